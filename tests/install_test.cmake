# Installs ebb into a folder, moves that folder, and builds and runs tests/install against it.
#   cmake -DBUILD=<build> -DSOURCE=<sources> -DOUT=<scratch folder> -DGENERATOR=... -DCXX=...
#     [-DFLAGS=...] -P install_test.cmake
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "failed with ${code}: ${ARGN}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()
function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "no '${pattern}' in:\n${text}")
  endif()
endfunction()

file(REMOVE_RECURSE ${OUT})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${OUT}/first)
file(RENAME ${OUT}/first ${OUT}/prefix)  # an installed ebb can be moved

# Nothing in the package points back to where it was built.
file(GLOB_RECURSE files ${OUT}/prefix/*.cmake)
list(LENGTH files count)
if(count LESS 4)
  message(FATAL_ERROR "the package files are ${files}")
endif()
foreach(file IN LISTS files)
  file(READ ${file} text)
  foreach(path IN ITEMS ${BUILD} ${SOURCE} ${OUT})
    string(FIND "${text}" "${path}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${path}")
    endif()
  endforeach()
endforeach()

set(configure ${CMAKE_COMMAND} -S ${SOURCE}/tests/install -B ${OUT}/build -G ${GENERATOR}
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${OUT}/prefix
  -DCMAKE_CXX_FLAGS=${FLAGS})
run(${configure})
run(${CMAKE_COMMAND} --build ${OUT}/build)
run(${OUT}/build/custom_op)
expect("${output}" "gradients right")
run(${OUT}/build/train_model ${SOURCE}/README.md ${OUT}/model 2)
expect("${output}" "step +1 \\| loss 5\\.")
run(${OUT}/prefix/bin/ebb --version)
expect("${output}" "^ebb [0-9]")
run(${OUT}/prefix/bin/ebb inspect ${OUT}/model)

# Another minor version is refused.
execute_process(COMMAND ${configure} -B ${OUT}/other -DWANT_VERSION=99.0 RESULT_VARIABLE code
  ERROR_VARIABLE errors OUTPUT_QUIET)
if(code EQUAL 0)
  message(FATAL_ERROR "find_package(ebb 99.0) found this version")
endif()
expect("${errors}" "99\\.0")
file(REMOVE_RECURSE ${OUT})
