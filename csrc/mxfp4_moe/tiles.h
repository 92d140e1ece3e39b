// The pairs of many rows sorted by expert and cut into tiles: parameters and launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dsv4::mxfp4_moe {

constexpr int kMaxTiledExperts = 1024;

// A tile is the sorted positions [begin, end) of one expert's pairs; tiles are in the order of their experts, and an expert's
// are as even as multiples of 16 can be.
struct TilesParams {
  const int32_t* topk_ids;    // [rows, topk]
  int64_t ids_stride;
  const int32_t* expert_map;  // [map_size] id -> local expert or -1; nullptr: id - first_expert
  int32_t map_size, first_expert;
  int32_t rows, topk, experts;
  int32_t tile_pairs;         // of a tile at most, a multiple of 16
  int32_t num_tiles;          // entries of the list: no routing fills more
  int32_t* pairs;             // [rows * topk] sorted position -> pair; behind the last local pair nothing is written
  int32_t* pair_expert;       // [rows * topk] local expert or -1
  int32_t* expert;            // [num_tiles] local expert, -1: no tile
  int32_t* begin;             // the same
  int32_t* end;               // the same
  int32_t* scratch;           // tiles_scratch_words
  uint32_t* taken;            // [num_taken] of launches behind, whose blocks ask for their units; zeroed
  int32_t num_taken;
};

int64_t tiles_scratch_words(int64_t pairs, int experts);

// The order within an expert is the pairs' own, so the result is a function of the ids.
void launch_tiles(const TilesParams& params, bool pdl, cudaStream_t stream);

}  // namespace dsv4::mxfp4_moe
