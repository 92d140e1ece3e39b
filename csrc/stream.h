// What a launch asks of its stream: which capture it is in, and how many multiprocessors it has.
#pragma once

#include <cuda_runtime.h>

namespace dsv4 {

// The number of the capture that the stream is in, unique in the process, or 0.
unsigned long long capture_id(cudaStream_t stream);

// Multiprocessors that a kernel on this stream can have: of its green context if it is of one (SGLang's --enable-pdmux), else
// `of_device`, which a MIG slice and an MPS share of the device give as theirs.
int stream_sms(cudaStream_t stream, int of_device);

}  // namespace dsv4
