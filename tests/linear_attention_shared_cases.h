// Gated linear attention with a decay per head and with one per channel: the cases that are the
// same for both (linear_attention_cases.h, linear_attention_channel_cases.h), against closed forms
// and against faults other implementations had. The ids B.. name reports in the trackers of such
// projects, given at each case.
#pragma once
#include <limits>

#include "tests/device_param.h"
#include "tests/linear_attention_inputs.h"

namespace ebb::testing {

class LinearAttentionCases : public OnDevice {
 protected:
  explicit LinearAttentionCases(bool by_channel) : by_channel_(by_channel) {}
  // A decay per channel has no contributions: memory is then not looked at.
  GlaInputs inputs(GlaShape s, uint64_t seed = 3, std::vector<int64_t> cu = {},
                   int64_t memory = 0) const {
    s.by_channel = by_channel_;
    return gla_inputs(s, seed, std::move(cu), by_channel_ ? 0 : memory);
  }
  GlaResult f32(const GlaInputs& in) const { return run(in, DType::f32, device()); }
  // bf16 where it exists; f32 on the CPU.
  DType low() const { return device().is_cuda() ? DType::bf16 : DType::f32; }
  double low_outputs() const { return device().is_cuda() ? 8e-3 : 2e-5; }
  double low_gradients() const { return device().is_cuda() ? 1.5e-2 : 2e-5; }
  void expect_both(const GlaInputs& in, const std::string& what) const {
    expect_parity(f32(in), exact(in, DType::f32), 2e-5, 2e-5, what);
    expect_parity(run(in, low(), device()), exact(in, low()), low_outputs(), low_gradients(),
                  what + " low");
  }

  void strong_decay_stays_finite() const;
  void many_sequences() const;
  void nothing_is_read_behind_the_last_token() const;
  void every_shape_of_tile() const;
  void value_columns_are_independent_and_summed() const;
  void large_upstream_gradient() const;
  void any_chunk_length() const;
  void infinite_decay_starts_afresh() const;

 private:
  bool by_channel_;
};

// FLA#99, #111: exp(g_i − g_j) for j > i overflowed before it was masked.
inline void LinearAttentionCases::strong_decay_stays_finite() const {
  GlaInputs in = inputs({.time = 128, .heads = 2});
  in.g.fill_(-30);
  for (const DType dtype : {DType::f32, low()}) EXPECT_TRUE(finite(run(in, dtype, device())));
  expect_both(in, "");
}

// FLA#172: batch·heads beyond 65,535 on a grid dimension that ends there.
inline void LinearAttentionCases::many_sequences() const {
  const int64_t batch = 10923, half = 5461;
  const GlaInputs in =
      inputs({.batch = batch, .time = 6, .groups = 2, .heads = 6, .key_dim = 2, .value_dim = 3});
  const auto part = [&](int64_t begin, int64_t end) {
    GlaInputs p = in;
    for (Tensor* t : {&p.q, &p.k, &p.v, &p.g, &p.h0, &p.weight, &p.d_o, &p.dht})
      if (*t) *t = t->slice(0, begin, end);
    return p;
  };
  const auto whole = fields(f32(in)), first = fields(f32(part(0, half))),
             second = fields(f32(part(half, batch)));
  for (size_t i = 0; i + 1 < whole.size(); ++i) {  // dskip is summed over the batch
    if (!whole[i].defined()) continue;
    EXPECT_TRUE(bitwise_equal(whole[i].slice(0, 0, half), first[i])) << kGlaNames[i];
    EXPECT_TRUE(bitwise_equal(whole[i].slice(0, half, batch), second[i])) << kGlaNames[i];
  }
}

// FLA#792: a mask was missing on the last, partial chunk.
inline void LinearAttentionCases::nothing_is_read_behind_the_last_token() const {
  for (const int64_t time : {1, 65, 80, 97, 127}) {
    const GlaInputs in = inputs({.time = time, .heads = 2, .value_dim = 32}, 3, {}, 48);
    for (const DType dtype : {DType::f32, low()}) {
      const GlaResult want = exact(in, dtype);
      GlaInputs guarded = in;
      for (Tensor* t :
           {&guarded.q, &guarded.k, &guarded.v, &guarded.g, &guarded.weight, &guarded.d_o}) {
        if (!*t) continue;
        Shape longer = t->shape();
        longer[1] = 192;
        const bool gate = t == &guarded.g || t == &guarded.weight;
        const DType to = gate ? accumulate_type(dtype) : dtype;
        const Tensor buffer =
            Tensor::full(longer, std::numeric_limits<double>::quiet_NaN(), to, device());
        const Tensor view = buffer.slice(1, 0, time);
        view.copy_(t->to(to, device()));
        ASSERT_TRUE(view.is_contiguous());  // so that the kernels see the NaNs behind it
        *t = view;
      }
      expect_parity(run(guarded, dtype, device()), want, dtype == DType::bf16 ? 8e-3 : 2e-5,
                    dtype == DType::bf16 ? 1.5e-2 : 2e-5, std::to_string(time));
    }
  }
}

// mamba#503: an offset overshot where one tile was larger than another.
inline void LinearAttentionCases::every_shape_of_tile() const {
  const int64_t sizes[][2] = {{1, 1},    {8, 8},    {16, 64},   {64, 16},  {72, 40},
                              {128, 64}, {64, 128}, {100, 200}, {256, 256}};
  uint64_t seed = 30;
  for (const auto& [k, v] : sizes)
    for (const int64_t time : {1, 15, 63, 64, 65, 200})
      expect_both(
          inputs({.batch = 2,
                  .time = time,
                  .groups = time == 65 ? 1 : 2,
                  .heads = time == 63 ? 6 : 2,
                  .key_dim = k,
                  .value_dim = v},
                 ++seed, {}, time == 200 ? 48 : 0),
          "K " + std::to_string(k) + " V " + std::to_string(v) + " T " + std::to_string(time));
}

// FLA#941, #1018: blocks of V overwrote each other's sums.
inline void LinearAttentionCases::value_columns_are_independent_and_summed() const {
  const GlaInputs in =
      inputs({.batch = 2, .time = 100, .heads = 2, .key_dim = 32, .value_dim = 128});
  const auto half = [&](int64_t begin) {
    GlaInputs p = in;
    for (Tensor* t : {&p.v, &p.h0, &p.d_o, &p.dht}) *t = t->slice(3, begin, begin + 64);
    return f32(p);
  };
  const GlaResult all = f32(in), a = half(0), b = half(64);
  EXPECT_LE(relative_error(all.o.slice(3, 0, 64), a.o), 1e-6);
  EXPECT_LE(relative_error(all.o.slice(3, 64, 128), b.o), 1e-6);
  EXPECT_LE(relative_error(all.dv.slice(3, 0, 64), a.dv), 1e-6);
  EXPECT_LE(relative_error(all.dh0.slice(3, 64, 128), b.dh0), 1e-6);
  const auto whole = fields(all), first = fields(a), second = fields(b);
  for (const size_t i : {3, 4, 6, 8, 9}) {  // dq, dk, dg, dweight, dskip
    if (!whole[i].defined()) continue;
    const Tensor sum = first[i].clone();
    for (int64_t j = 0; j < sum.numel(); ++j) sum.data<double>()[j] += second[i].data<double>()[j];
    EXPECT_LE(relative_error(whole[i], sum), 3e-6) << kGlaNames[i];
  }
}

// FLA#1214: the state's gradient overflowed a 16-bit type.
inline void LinearAttentionCases::large_upstream_gradient() const {
  GlaInputs in = inputs({.time = 200, .heads = 2, .key_dim = 32, .value_dim = 32});
  in.g.fill_(-1e-3);
  for (Tensor* t : {&in.d_o, &in.dht})
    for (int64_t i = 0; i < t->numel(); ++i) t->data<double>()[i] *= 1e6;
  expect_parity(run(in, low(), device()), exact(in, low()), low_outputs(), low_gradients());
}

// mamba#449, FLA#988: lengths and chunks that are no powers of two.
inline void LinearAttentionCases::any_chunk_length() const {
  for (const int64_t time : {17, 200}) {
    GlaInputs in = inputs({.time = time, .groups = 1, .heads = 3, .value_dim = 24}, 5);
    for (const int64_t chunk : {1, 16, 37, 40, 50, 64, 100, 128, 256}) {
      in.chunk = chunk;
      expect_both(in, "chunk " + std::to_string(chunk) + " T " + std::to_string(time));
    }
  }
}

inline void LinearAttentionCases::infinite_decay_starts_afresh() const {
  GlaInputs in = inputs({.time = 140});
  in.dht = {};
  in.g.select(1, 77).fill_(-std::numeric_limits<double>::infinity());
  const GlaResult got = f32(in);
  in.cu = {0, 77, 140};
  const Tensor two = Tensor::zeros({2, 1, 16, 16}, DType::f64);
  two.slice(0, 0, 1).copy_(in.h0);
  in.h0 = two;
  GlaResult want = f32(in);
  EXPECT_EQ(euclidean_norm(got.dg.select(1, 77)), 0);
  want.dg.select(1, 77).fill_(0);
  EXPECT_TRUE(finite(got));
  want.dh0 = want.dh0.slice(0, 0, 1);
  expect_parity(got, want, 2e-6, 4e-6);
}

}  // namespace ebb::testing
