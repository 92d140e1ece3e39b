// What calls of many rows share on the host: their scratch, the tiles of pairs in it, y a part of the columns at a time.
#pragma once

#include "mxfp4_moe.h"
#include "sorted.h"
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

// Where the sorted pairs and the tiles of one expert's pairs lie.
struct Tiling {
  int64_t pairs, pair_expert, expert, begin, end, words, taken;
  int num_tiles, tile_pairs, launches;

  // `launches`: of products whose blocks ask for their units
  Tiling(Scratch& scratch, int64_t all_pairs, int experts, int tile_pairs_, int launches_) : tile_pairs(tile_pairs_), launches(launches_) {
    num_tiles = static_cast<int>(all_pairs / tile_pairs + experts);
    pairs = scratch.take(all_pairs * 4);
    pair_expert = scratch.take(all_pairs * 4);
    expert = scratch.take(num_tiles * 4ll);
    begin = scratch.take(num_tiles * 4ll);
    end = scratch.take(num_tiles * 4ll);
    words = scratch.take(tiles_scratch_words(all_pairs, experts) * 4);
    taken = scratch.take(launches * 4ll);
  }

  TilesParams of(const Params& params, unsigned char* scratch) const {
    const auto at = [&](int64_t place) { return reinterpret_cast<int32_t*>(scratch + place); };
    TilesParams tiles = {};
    tiles.topk_ids = params.topk_ids, tiles.ids_stride = params.ids_stride;
    tiles.expert_map = params.expert_map, tiles.map_size = params.map_size, tiles.first_expert = params.first_expert;
    tiles.rows = params.rows, tiles.topk = params.topk, tiles.experts = params.experts;
    tiles.tile_pairs = tile_pairs, tiles.num_tiles = num_tiles;
    tiles.pairs = at(pairs), tiles.pair_expert = at(pair_expert), tiles.scratch = at(words);
    tiles.taken = reinterpret_cast<uint32_t*>(scratch + taken), tiles.num_taken = launches;
    tiles.expert = at(expert), tiles.begin = at(begin), tiles.end = at(end);
    return tiles;
  }
};

constexpr int64_t kMostOfY = 96 << 20;  // bytes; an SM120's L2 has 128 MB

// Outputs of a row that y holds at a time; `unit`: of the kernel that makes them.
inline int columns_of_y(int64_t all_pairs, int hidden, int bytes, int unit) {
  int columns = hidden;
  while (all_pairs * columns * bytes > kMostOfY && columns % (2 * unit) == 0) columns /= 2;
  return columns;
}

// Products that a call launches: gate/up, and down once for each part of y.
inline int launches_of(int hidden, int columns) { return 1 + hidden / columns; }

// Of the first columns; of the others `out` is behind them.
inline SumParams sum_of(const Params& params, const TilesParams& tiles, const void* y, int columns) {
  SumParams sum = {y, tiles.pair_expert, params.topk_weights, params.out, params.weights_stride, params.out_stride};
  sum.routed_scaling = params.routed_scaling, sum.rows = params.rows, sum.topk = params.topk, sum.columns = columns;
  return sum;
}

// What both kinds of products have of a call and its tiles.
template <typename Product>
Product product_of(const Params& params, const TilesParams& tiles) {
  Product product = {};
  product.pairs = tiles.pairs, product.expert = tiles.expert, product.begin = tiles.begin, product.end = tiles.end;
  product.taken = tiles.taken, product.num_tiles = tiles.num_tiles, product.topk = params.topk;
  product.limit = params.limit, product.gate_row = params.gate_row, product.up_row = params.up_row;
  return product;
}

}  // namespace dsv4::mxfp4_moe
