// Built for AMX and for AVX512_BF16. The gradient of a layer's outputs lies on the grid of its inputs, with zeros where
// an output means nothing and before the first image: then windows may reach across rows and images, and a filter's
// gradient is a product with the same grid moved by as many places as its block is behind the window's first.
#include "torso_parts.hpp"

namespace murmurate {
namespace {

constexpr int64_t kPacked = 1 << 14;  // numbers that are packed at a time: they stay in the nearest cache
constexpr int64_t kPanel = 4 * kDeep;  // columns of the fully connected layer at a time

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t front(const Layer& l) { return up((l.kernel - 1) * (l.width + 1), kDeep); }  // places before the first image
int64_t behind(const Layer& l, int64_t batch) { return up(batch * grid(l), kDeep); }
int64_t combinations(const Layer& l) { return l.kernel * l.kernel * l.filters / kRows; }
int64_t across(const Layer& l) { return up(l.channels, kDeep) / kRows; }  // tiles of a block's numbers

// Places whose blocks are packed at a time.
int64_t places_packed(const Layer& l) { return up(larger(kPacked / (across(l) * kRows), 4 * kDeep), kDeep); }

// Numbers from one filter's row of gradients to the next: an odd number of cache lines, so that 16 rows are not all
// kept in the same few places of the cache.
int64_t apart(const Layer& l, int64_t batch) { return up(front(l) + behind(l, batch), 2 * kDeep) + kDeep; }

struct Backward {
  int64_t *offset, *steps;
  int32_t* order;
  int64_t* place;
  float *bias, *sums;
  Brain *ahead, *ahead_turned;  // gradient of the fully connected layer's outputs, by sample and by feature
  Brain *right, *turned;
  Brain* grid[Torso::kMost];  // gradient of each convolution's outputs
};

Backward share_backward(const Torso& t, int64_t batch, Shares& shares) {
  const int64_t samples = up(batch, kDeep);
  int64_t deep = 0, steps = larger(samples, t.features) / kDeep, places = 0, width = t.features, sums = 0, turned = 0;
  int64_t right = larger(larger(samples, t.features) * kPanel, kPacked);
  Backward b;
  for (int64_t i = 0; i < t.layers; ++i) {
    const Layer& l = t.layer[i];
    deep = larger(deep, depth(l));
    steps = larger(steps, larger(places_packed(l), l.kernel * l.kernel * l.filters) / kDeep);
    places = larger(places, grid(l));
    width = larger(width, l.filters);
    sums = larger(sums, (combinations(l) + 1) * across(l) * kSums);
    turned = larger(turned, l.filters * apart(l, batch));
    right = larger(right, larger(l.filters * depth(l), places_packed(l) * across(l) * kRows));
    b.grid[i] = shares.take<Brain>((front(l) + behind(l, batch)) * l.filters);
  }
  b.offset = shares.take<int64_t>(steps);
  b.steps = shares.take<int64_t>(steps);
  for (int64_t j = 0; shares.base && j < steps; ++j) b.steps[j] = j * kDeep;
  b.order = shares.take<int32_t>(deep);
  b.place = shares.take<int64_t>(places);
  b.bias = shares.take<float>(width);
  b.sums = shares.take<float>(sums);
  b.ahead = shares.take<Brain>(samples * t.features);
  b.ahead_turned = shares.take<Brain>(samples * t.features);
  b.right = shares.take<Brain>(right);
  b.turned = shares.take<Brain>(turned);
  return b;
}

// [count], a multiple of 16, rounded.
void put_all(const float* from, int64_t count, Brain* to) {
  for (int64_t i = 0; i < count; i += kRows) store16(to + i, rounded(_mm512_loadu_ps(from + i)));
}

void clear(void* at, int64_t bytes) { std::memset(at, 0, static_cast<std::size_t>(bytes)); }

void add_to(float* at, __m512 x) { _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), x)); }

// What passes a ReLU, in both layouts, and the gradient of the bias.
void enter(const Torso& t, int64_t batch, const Brain* features, const Brain* gradient, const Backward& b,
           Brain* bias) {
  const int64_t samples = up(batch, kDeep);
  for (int64_t k = 0; k < t.features; k += kRows) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t at = i * t.features + k;
      const __m256i passed = _mm256_maskz_mov_epi16(open(load16(features + at)), load16(gradient + at));
      store16(b.ahead + at, passed);
      sum = _mm512_add_ps(sum, widened(passed));
    }
    store16(bias + k, rounded(sum));
  }
  clear(b.ahead + batch * t.features, (samples - batch) * t.features * static_cast<int64_t>(sizeof(Brain)));
  turn(b.ahead, samples, t.features, b.ahead_turned, samples);
}

// The fully connected layer's weights: features x samples times samples x inputs.
void connected_weight(const Torso& t, int64_t batch, const Brain* x, const Backward& b, Brain* gradient) {
  alignas(64) float sums[4 * kSums];
  const int64_t deep = flat(t), samples = up(batch, kDeep), steps = samples / kDeep;
  const Inner inner = {samples, b.steps, steps, 2 * kTile};
  for (int64_t k = 0; k < deep; k += kPanel) {
    const int64_t wide = deep - k < kPanel ? deep - k : kPanel;
    pairs_of(x + k, deep, batch, wide, steps, b.right);
    settle();
    for (int64_t m = 0; m < t.features; m += 2 * kRows)
      for (int64_t column = 0; column < wide; column += kDeep) {
        const Brain *left = b.ahead_turned + m * samples, *right = b.right + column * samples;
        products_2x2(inner, left, left + kRows * samples, right, right + kTile, sums, sums + 2 * kSums);
        for (int64_t i = 0; i < 2 * kRows; ++i) {
          const float* row = sums + i / kRows * 2 * kSums + i % kRows * kRows;
          const __m512i pair = rounded(_mm512_load_ps(row), _mm512_load_ps(row + kSums));
          _mm512_storeu_si512(gradient + (m + i) * deep + k + column, pair);
        }
      }
  }
}

// Its inputs: samples x features times features x inputs; what passes the ReLU goes to the last layer's grid.
void connected_input(const Torso& t, int64_t batch, const Brain* x, const Brain* weight, const Backward& b) {
  alignas(64) float sums[4 * kSums];
  const Layer& l = last(t);
  const int64_t deep = flat(t), size = grid(l) * l.filters, wide = out_width(l);
  Brain* grids = b.grid[t.layers - 1] + front(l) * l.filters;
  const Inner inner = {t.features, b.steps, t.features / kDeep, 2 * kTile};
  for (int64_t k = 0; k < deep; k += kDeep) {
    if (k % kPanel == 0) {
      pairs_of(weight + k, deep, t.features, deep - k < kPanel ? deep - k : kPanel, inner.steps, b.right);
      settle();
    }
    const Brain* right = b.right + k % kPanel * t.features;
    for (int64_t n = 0; n < batch; n += 2 * kRows) {
      const Brain* left = b.ahead + n * t.features;
      products_2x2(inner, left, left + kRows * t.features, right, right + kTile, sums, sums + 2 * kSums);
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t column = k + half * kRows, place = column / l.filters, band = column % l.filters;
        Brain* to = grids + n * size + (place / wide * l.width + place % wide) * l.filters + band;
        const Brain* output = x + n * deep + column;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < 2 * kRows && n + i < batch; ++i, to += size, output += deep) {
          const float* row = sums + (i / kRows * 2 + half) * kSums + i % kRows * kRows;
          const __m512 y = _mm512_maskz_loadu_ps(open(load16(output)), row);
          sum = _mm512_add_ps(sum, y);
          store16(to, rounded(y));
        }
        add_to(b.bias + band, sum);
      }
    }
  }
}

// Filters of layer i: for each block of a filter, filters x places times places x numbers of a block.
void filters(const Torso& t, int64_t i, int64_t batch, const Brain* x, const Backward& b,
             Brain* gradient) {
  const Layer& l = t.layer[i];
  const int64_t total = batch * grid(l), stride = apart(l, batch), tiles = across(l), count = combinations(l);
  const int64_t bands = l.filters / kRows;
  turn(b.grid[i], front(l) + behind(l, batch), l.filters, b.turned, stride);
  clear(b.sums, count * tiles * kSums * static_cast<int64_t>(sizeof(float)));
  // combination: a block of the filter, and 16 filters
  const auto left = [&](int64_t combination) {
    const int64_t block = combination / bands, back = block / l.kernel * l.width + block % l.kernel;
    return b.turned + combination % bands * kRows * stride + front(l) - back;
  };
  const int64_t some = places_packed(l);
  for (int64_t place = 0; place < total; place += some) {
    const int64_t rest = total - place, steps = up(rest < some ? rest : some, kDeep) / kDeep;
    const Inner inner = {stride, b.steps, steps, 2 * kTile};
    pairs_of(x + place * l.channels, l.channels, rest, l.channels, steps, b.right);
    settle();
    for (int64_t tile = 0; tile < tiles; tile += tiles % 4 ? 2 : 4) {
      const Brain* right = b.right + tile * steps * kTile;
      for (int64_t k = 0; k < count; k += tiles % 4 ? 2 : 1) {
        float* sums = b.sums + (k * tiles + tile) * kSums;
        const Brain* a = left(k) + place;
        if (tiles % 4 == 0)
          products_1x4(inner, a, right, 2 * steps * kTile, sums);
        else  // an odd one's second result goes behind all others
          products_2x2(inner, a, k + 1 < count ? left(k + 1) + place : a, right, right + kTile, sums,
                       sums + tiles * kSums, true);
      }
    }
  }
  order_of(l, i == 0, b.order);
  const __m512 scale = _mm512_set1_ps(i ? 1.0f : kPixel);
  const int64_t deep = depth(l);
  for (int64_t k = 0; k < count; ++k)
    for (int64_t c = 0; c < l.channels; c += kRows)
      for (int64_t row = 0; row < kRows; ++row) {
        const float* at = b.sums + (k * tiles + c / kRows) * kSums + row * kRows;
        const int32_t* order = b.order + k / bands * l.channels + c;
        alignas(32) Brain some[kRows];
        store16(some, rounded(_mm512_mul_ps(_mm512_loadu_ps(at), scale)));
        Brain* to = gradient + (k % bands * kRows + row) * deep;
        for (int64_t n = 0; n < kRows; ++n) to[order[n]] = some[n];
      }
}

// Filters, turned round, as a right factor: window of gradients x numbers of a block.
void pack_turned(const Layer& l, const Brain* weight, const int32_t* order, Brain* to) {
  const int64_t deep = depth(l), blocks = l.kernel * l.kernel;
  for (int64_t n = 0; n < l.channels; n += kRows)
    for (int64_t block = blocks - 1; block >= 0; --block)
      for (int64_t o = 0; o < l.filters; o += 2)
        for (int64_t c = n; c < n + kRows; ++c) {
          const int32_t at = order[block * l.channels + c];
          *to++ = weight[o * deep + at];
          *to++ = weight[(o + 1) * deep + at];
        }
}

// Inputs of layer i > 0, after its filters, whose order is used again; what passes the ReLU goes to the grid of the
// layer before.
void inputs(const Torso& t, int64_t i, int64_t batch, const Brain* x, const Brain* weight, const Backward& b) {
  const Layer &l = t.layer[i], &before = t.layer[i - 1];
  const int64_t places = grid(l), size = grid(before) * before.filters;
  pack_turned(l, weight, b.order, b.right);
  settle();
  for (int64_t p = 0; p < places; ++p)
    b.place[p] = (p / l.width * l.block * before.width + p % l.width * l.block) * before.filters;
  Brain* to = b.grid[i - 1] + front(before) * before.filters;
  const int64_t* place = b.place;
  float* bias = b.bias;
  const int64_t steps = steps_of(l.kernel, l.kernel * l.filters, l.width * l.filters, b.offset);
  const Brain* first_window = b.grid[i] + (front(l) - (l.kernel - 1) * (l.width + 1)) * l.filters;
  go_along({first_window, batch * places, {l.filters, b.offset, steps, kTile}, b.right, l.channels / kRows},
           [=, &l, &before](int64_t first, int64_t skip, int64_t tile, const float* sums) {
             const int64_t channel = tile * kRows, pixel = channel / before.filters, band = channel % before.filters;
             const int64_t shift = (pixel / l.block * before.width + pixel % l.block) * before.filters + band;
             const int64_t channels = l.channels;
             __m512 sum = _mm512_setzero_ps();
             int64_t at = (first + skip) % places;
             Brain* image = to + (first + skip) / places * size + shift;
             for (int64_t row = skip; row < kRows; ++row) {
               const __mmask16 passes = open(load16(x + (first + row) * channels + channel));
               const __m512 y = _mm512_maskz_mov_ps(passes, _mm512_load_ps(sums + row * kRows));
               sum = _mm512_add_ps(sum, y);
               store16(image + place[at], rounded(y));
               const bool whole = ++at == places;
               at = whole ? 0 : at;
               image += whole ? size : 0;
             }
             add_to(bias + band, sum);
           });
}

}  // namespace

bool MURMURATE_TILES::backward(const Torso& t, int64_t batch, const Brain* laid, const Brain* inner,
                               const Brain* features, const Brain* gradient, const Brain* const* parameters,
                               Brain* const* to, int64_t first) {
  Shares measured = {nullptr, 0};
  share_backward(t, batch, measured);
  Shares shares = {MURMURATE_TILES::room_of(measured.used), 0};
  if (!shares.base) return false;
  const Backward b = share_backward(t, batch, shares);
  const Brain* x[Torso::kMost + 1] = {laid};  // of each layer
  for (int64_t i = 0; i < t.layers; ++i) {
    const Layer& l = t.layer[i];
    x[i + 1] = inner;
    inner += up(batch * outputs(t, i), kDeep);
    clear(b.grid[i], (front(l) + behind(l, batch)) * l.filters * static_cast<int64_t>(sizeof(Brain)));
  }
  const Tiles tiles;
  enter(t, batch, features, gradient, b, to[2 * t.layers + 1]);
  settle();
  connected_weight(t, batch, x[t.layers], b, to[2 * t.layers]);
  if (first == t.layers) return true;
  clear(b.bias, last(t).filters * static_cast<int64_t>(sizeof(float)));
  connected_input(t, batch, x[t.layers], parameters[2 * t.layers], b);
  for (int64_t i = t.layers - 1; i >= first; --i) {
    put_all(b.bias, t.layer[i].filters, to[2 * i + 1]);
    filters(t, i, batch, x[i], b, to[2 * i]);
    if (i == first) break;
    clear(b.bias, t.layer[i - 1].filters * static_cast<int64_t>(sizeof(float)));
    inputs(t, i, batch, x[i], parameters[2 * i], b);
  }
  return true;
}

}  // namespace murmurate
