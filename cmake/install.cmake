# `cmake --install BUILD --prefix DIR`: bin/ebb, lib/libebb.a, the headers under include/ebb, and
# the package that find_package(ebb) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ebb)

# Users compile against fmt, JSON and OpenMP; the rest is linked only.
set(installed_libraries fmt::fmt nlohmann_json::nlohmann_json OpenMP::OpenMP_CXX
  $<LINK_ONLY:BLAS::BLAS>)
set(EBB_LINKED "")  # name=library, for the package file
foreach(library IN ITEMS zstd zlib sentencepiece)
  string(TOUPPER ${library} upper)
  if(EBB_HAVE_${upper})
    list(APPEND installed_libraries $<LINK_ONLY:ebb::${library}>)
    get_filename_component(file ${EBB_${upper}_LIBRARY} NAME)
    list(APPEND EBB_LINKED ${library}=${file})
  endif()
endforeach()
if(EBB_WITH_CUDA)
  target_compile_definitions(ebb_lib INTERFACE $<INSTALL_INTERFACE:EBB_WITH_CUDA>)
  list(APPEND installed_libraries $<LINK_ONLY:CUDA::cublas> $<LINK_ONLY:CUDA::cublasLt>
    $<LINK_ONLY:CUDA::cudart>)
endif()
foreach(library IN LISTS installed_libraries)
  target_link_libraries(ebb_lib INTERFACE $<INSTALL_INTERFACE:${library}>)
endforeach()
target_compile_features(ebb_lib INTERFACE cxx_std_20)
target_include_directories(ebb_lib INTERFACE
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/ebb>)
if(EBB_SANITIZE)
  target_link_options(ebb_lib INTERFACE $<INSTALL_INTERFACE:-fsanitize=${EBB_SANITIZE}>)
  foreach(option IN LISTS EBB_SANITIZE_LINK)
    target_link_options(ebb_lib INTERFACE $<INSTALL_INTERFACE:${option}>)
  endforeach()
endif()

install(TARGETS ebb_lib EXPORT ebb-targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS ebb RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY tensor autograd ops nn models train eval
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ebb
  FILES_MATCHING PATTERN "*.h" PATTERN data EXCLUDE PATTERN report EXCLUDE)
install(FILES LICENSE THIRD_PARTY.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT ebb-targets NAMESPACE ebb:: DESTINATION ${package_dir})
configure_package_config_file(cmake/ebb-config.cmake.in ${PROJECT_BINARY_DIR}/ebb-config.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ebb-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ebb-config.cmake
  ${PROJECT_BINARY_DIR}/ebb-config-version.cmake DESTINATION ${package_dir})
