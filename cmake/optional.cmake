# Optional libraries: found where they are, never required. For each one EBB_HAVE_<NAME>, the
# imported target ebb::<name>, and a line for `ebb --version`.
#   ebb_optional(NAME header library debian-package "what it is for")
option(EBB_OPTIONAL "Use the optional libraries that are there" ON)
set(EBB_OPTIONAL_FOUND "")
set(EBB_OPTIONAL_MISSING "")
function(ebb_optional name header library package purpose)
  string(TOUPPER ${name} upper)
  find_path(EBB_${upper}_INCLUDE ${header})
  find_library(EBB_${upper}_LIBRARY ${library})
  mark_as_advanced(EBB_${upper}_INCLUDE EBB_${upper}_LIBRARY)
  if(EBB_OPTIONAL AND EBB_${upper}_INCLUDE AND EBB_${upper}_LIBRARY)
    set(EBB_HAVE_${upper} ON PARENT_SCOPE)
    if(NOT TARGET ebb::${name})
      add_library(ebb::${name} UNKNOWN IMPORTED)
      set_target_properties(ebb::${name} PROPERTIES IMPORTED_LOCATION ${EBB_${upper}_LIBRARY}
        INTERFACE_INCLUDE_DIRECTORIES ${EBB_${upper}_INCLUDE})
    endif()
    set(EBB_OPTIONAL_FOUND ${EBB_OPTIONAL_FOUND} "${name}: ${purpose}" PARENT_SCOPE)
  else()
    set(EBB_HAVE_${upper} OFF PARENT_SCOPE)
    set(EBB_OPTIONAL_MISSING ${EBB_OPTIONAL_MISSING} "${name}: ${purpose} (${package})"
      PARENT_SCOPE)
  endif()
endfunction()

ebb_optional(zstd zstd.h zstd libzstd-dev "compressed text")
ebb_optional(zlib zlib.h z zlib1g-dev "compressed text")
ebb_optional(sentencepiece sentencepiece_processor.h sentencepiece libsentencepiece-dev
  "SentencePiece tokenizers")
ebb_optional(pcre2 pcre2.h pcre2-8 libpcre2-dev "byte-level BPE tokenizers")
