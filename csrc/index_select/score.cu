#include "score_launch.cuh"

namespace dsv4::index_select {
template void launch_score_format<Format::kFp4>(const ScoreParams&, bool, cudaStream_t);
template KernelAttributes score_attributes<Format::kFp4>(int);
template void launch_score_format<Format::kFp8>(const ScoreParams&, bool, cudaStream_t);
template KernelAttributes score_attributes<Format::kFp8>(int);
template void launch_score_format<Format::kFp8Half>(const ScoreParams&, bool, cudaStream_t);
template KernelAttributes score_attributes<Format::kFp8Half>(int);
}  // namespace dsv4::index_select
