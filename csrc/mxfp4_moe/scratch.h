// What calls of many rows share on the host: their scratch, and the tiles of pairs in it.
#pragma once

#include "mxfp4_moe.h"
#include "tiles.h"

namespace dsv4::mxfp4_moe {

// A call's scratch, handed out from its beginning, in bytes.
struct Scratch {
  int64_t size = 0;

  int64_t take(int64_t bytes) {
    const int64_t here = size;
    size += ceil_div(bytes, 256) * 256;
    return here;
  }
};

// Where the sorted pairs and whole tiles of one expert's pairs lie.
struct Tiling {
  int64_t pairs, pair_expert, expert, begin, end, words;
  int num_tiles, tile_pairs;

  Tiling(Scratch& scratch, int64_t all_pairs, int experts, int tile_pairs_) : tile_pairs(tile_pairs_) {
    num_tiles = static_cast<int>(all_pairs / tile_pairs + experts);
    pairs = scratch.take(all_pairs * 4);
    pair_expert = scratch.take(all_pairs * 4);
    expert = scratch.take(num_tiles * 4ll);
    begin = scratch.take(num_tiles * 4ll);
    end = scratch.take(num_tiles * 4ll);
    words = scratch.take(tiles_scratch_words(all_pairs, experts) * 4);
  }

  TilesParams of(const Params& params, unsigned char* scratch) const {
    const auto at = [&](int64_t place) { return reinterpret_cast<int32_t*>(scratch + place); };
    TilesParams tiles = {};
    tiles.topk_ids = params.topk_ids, tiles.ids_stride = params.ids_stride;
    tiles.expert_map = params.expert_map, tiles.map_size = params.map_size, tiles.first_expert = params.first_expert;
    tiles.rows = params.rows, tiles.topk = params.topk, tiles.experts = params.experts;
    tiles.block_m = tile_pairs, tiles.num_whole = num_tiles, tiles.pieces = false;
    tiles.pairs = at(pairs), tiles.pair_expert = at(pair_expert), tiles.scratch = at(words);
    tiles.expert = at(expert), tiles.begin = at(begin), tiles.end = at(end);
    return tiles;
  }
};

}  // namespace dsv4::mxfp4_moe
