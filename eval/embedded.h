// Files that are part of the binary, so that it runs wherever it is copied.
#pragma once
#include <string_view>

namespace ebb::embedded {

std::string_view adjectives();  // eval/data/words_adjectives.txt
std::string_view nouns();       // eval/data/words_nouns.txt
std::string_view echarts();     // vendor/echarts/echarts.min.js
std::string_view report_css();  // eval/report/report.css
std::string_view report_js();   // eval/report/report.js

}  // namespace ebb::embedded
