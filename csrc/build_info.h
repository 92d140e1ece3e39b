// How the library was built, as csrc/build_artifact.py says it.
#pragma once

namespace dsv4 {

struct BuildInfo {
  const char *version, *git_commit, *archs;  // archs: "120a 120f 121a 90a"
  int cudart;                                // CUDART_VERSION
};
BuildInfo build_info();

}  // namespace dsv4
