#include "eval/embedded.h"

// The assembler copies FILE, found relative to EBB_SOURCE_DIR, between two symbols.
#define EBB_EMBED(NAME, FILE)                                                          \
  asm(".pushsection .rodata\n"                                                         \
      ".global ebb_embedded_" #NAME                                                    \
      "\n"                                                                             \
      "ebb_embedded_" #NAME                                                            \
      ":\n"                                                                            \
      ".incbin \"" EBB_SOURCE_DIR "/" FILE                                             \
      "\"\n"                                                                           \
      ".global ebb_embedded_" #NAME                                                    \
      "_end\n"                                                                         \
      "ebb_embedded_" #NAME                                                            \
      "_end:\n"                                                                        \
      ".byte 0\n"                                                                      \
      ".popsection\n");                                                                \
  extern "C" const char ebb_embedded_##NAME[];                                         \
  extern "C" const char ebb_embedded_##NAME##_end[];                                   \
  namespace ebb::embedded {                                                            \
  std::string_view NAME() { return {ebb_embedded_##NAME, ebb_embedded_##NAME##_end}; } \
  }

EBB_EMBED(adjectives, "eval/data/words_adjectives.txt")
EBB_EMBED(nouns, "eval/data/words_nouns.txt")
EBB_EMBED(echarts, "vendor/echarts/echarts.min.js")
EBB_EMBED(report_css, "eval/report/report.css")
EBB_EMBED(report_js, "eval/report/report.js")
