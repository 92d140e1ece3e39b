#include "build_info.h"

#include <cuda_runtime.h>

dsv4::BuildInfo dsv4::build_info() { return {DSV4_VERSION, DSV4_GIT_COMMIT, DSV4_ARCHS, CUDART_VERSION}; }
