// dplr against the delta rule it contains, against its own steps, and against faults that other
// implementations had; on every device. Values, gradients and errors case by case:
// op_rows/dplr.cpp.
#include "ops/dplr.h"

#include <omp.h>

#include <cmath>
#include <limits>

#include "autograd/tape.h"
#include "ops/delta_rule_channel.h"
#include "tensor/device_flags.h"
#include "tests/device_param.h"
#include "tests/op_harness.h"
#include "tests/reference/dplr.h"
#include "tests/result_parity.h"

namespace ebb::testing {
namespace {

struct Inputs {
  Tensor r, w, k, v, a, b, h0, d_o, dht;  // f64 on the CPU
  DplrOptions options = {.want_final_state = true};
};

// RWKV-7's: a = −k̂, b = k̂∘rate.
Inputs rwkv_inputs(int64_t batch, int64_t time, int64_t heads, int64_t k, int64_t v,
                   double strongest = -0.6065, uint64_t seed = 3) {
  Draw draw(seed);
  const Shape keys{batch, time, heads, k}, values{batch, time, heads, v}, state{batch, heads, k, v};
  Inputs in{draw.normal(keys),      draw.uniform(keys, strongest, 0),
            draw.normal(keys, 0.3), draw.normal(values),
            draw.normal(keys),      draw.uniform(keys, 0.05, 0.95),
            draw.normal(state),     draw.normal(values),
            draw.normal(state)};
  normalize_rows(in.a);
  for (int64_t i = 0; i < in.a.numel(); ++i) {
    in.b.data<double>()[i] *= in.a.data<double>()[i];
    in.a.data<double>()[i] *= -1;
  }
  return in;
}

const char* const kNames[] = {"o", "ht", "dr", "dw", "dk", "dv", "da", "db", "dh0"};

std::vector<Tensor> run(const Inputs& in, DType dtype, Device device) {
  const DType gate = accumulate_type(dtype);
  const auto leaf = [&](const Tensor& t, DType to) { return Var::leaf(t.to(to, device)); };
  const Var x[] = {leaf(in.r, dtype),
                   leaf(in.w, gate),
                   leaf(in.k, dtype),
                   leaf(in.v, dtype),
                   leaf(in.a, dtype),
                   leaf(in.b, dtype),
                   in.h0 ? leaf(in.h0, gate) : Var()};
  const DplrOutput y = dplr(x[0], x[1], x[2], x[3], x[4], x[5], x[6], in.options);
  backward(std::vector{y.o, y.ht}, std::vector{in.d_o.to(dtype, device), in.dht.to(gate, device)});
  std::vector<Tensor> out{y.o.value(), y.ht.value()};
  for (const Var& leaf : x)
    if (leaf.defined()) out.push_back(leaf.grad());
  for (Tensor& t : out) t = t.to(DType::f64, Device());
  return out;
}

class Dplr : public OnDevice {};
INSTANTIATE_TEST_SUITE_P(Every, Dplr, every_device(), device_name);

// The delta rule reads its key after the decay, dplr before it: a = −β e^g∘k, b = k.
TEST_P(Dplr, ContainsTheDeltaRule) {
  const DType dtype = device().is_cuda() ? DType::f32 : DType::f64;
  const double limit = device().is_cuda() ? 2e-5 : 1e-12;
  Draw draw(5);
  const Shape keys{2, 83, 2, 12}, values{2, 83, 2, 9};
  const Tensor q = draw.normal(keys), k = draw.normal(keys), v = draw.normal(values);
  const Tensor g = draw.uniform(keys, -1.5, 0), beta = draw.uniform({2, 83, 2}, 0, 1);
  normalize_rows(k);
  const Tensor a = k.clone(), write = v.clone();
  for (int64_t i = 0; i < k.numel(); ++i)
    a.data<double>()[i] *= -beta.data<double>()[i / 12] * std::exp(g.data<double>()[i]);
  for (int64_t i = 0; i < v.numel(); ++i) write.data<double>()[i] *= beta.data<double>()[i / 9];
  const auto here = [&](const Tensor& t) { return Var(t.to(dtype, device())); };
  // b = k, and what is written, k (βv)ᵀ, is the delta rule's β v.
  const DplrOutput y = dplr(here(q), here(g), here(k), here(write), here(a), here(k), {},
                            {.want_final_state = true});
  const DeltaRuleOutput want =
      kda(here(q), here(k), here(v), here(g), here(beta), {}, {.want_final_state = true});
  EXPECT_LE(relative_error(y.o.value(), want.o.value()), limit);
  EXPECT_LE(relative_error(y.ht.value(), want.ht.value()), limit);
}

TEST_P(Dplr, PrefillThenStepsEqualsTheWholeSequence) {
  for (const DType dtype : dtypes())
    for (const int64_t split : {1, 2, 3, 17, 64, 69}) {
      const Inputs in = rwkv_inputs(2, 70, 3, 24, 40);
      const DType gate = accumulate_type(dtype);
      const auto part = [&](const Tensor& t, DType to, int64_t begin, int64_t end) {
        return t.to(to, device()).slice(1, begin, end);
      };
      const auto from = [&](int64_t begin, int64_t end, const Tensor& h0) {
        return dplr(part(in.r, dtype, begin, end), part(in.w, gate, begin, end),
                    part(in.k, dtype, begin, end), part(in.v, dtype, begin, end),
                    part(in.a, dtype, begin, end), part(in.b, dtype, begin, end), h0,
                    {.want_final_state = true});
      };
      const DplrOutput whole = from(0, 70, in.h0.to(gate, device()));
      const DplrOutput prefix = from(0, split, in.h0.to(gate, device()));
      const Tensor state = prefix.ht.value().clone();
      const double limit = dtype == DType::bf16 ? 1e-2 : dtype == DType::f64 ? 1e-12 : 1e-5;
      for (int64_t t = split; t < 70; ++t) {
        const auto token = [&](const Tensor& x, DType to) {
          return part(x, to, t, t + 1).select(1, 0);
        };
        const Tensor o =
            dplr_step(token(in.r, dtype), token(in.w, gate), token(in.k, dtype), token(in.v, dtype),
                      token(in.a, dtype), token(in.b, dtype), state);
        EXPECT_LE(relative_error(o, whole.o.value().select(1, t)), limit) << split << ' ' << t;
      }
      EXPECT_LE(relative_error(state, whole.ht.value()), limit) << split;
    }
}

// B12: sequences beyond 65,536 tokens; the last tokens against the reference.
TEST_P(Dplr, B12_SequencesBeyond16Bits) {
  for (const DType dtype : dtypes())
    for (const int64_t time : {65536, 65537, 131073}) {
      Inputs in = rwkv_inputs(1, time, 1, 8, 8);
      in.options.lower_bound = -0.6066;
      const DType gate = accumulate_type(dtype);
      const auto here = [&](const Tensor& t, DType to) { return Var(t.to(to, device())); };
      const DplrOutput y =
          dplr(here(in.r, dtype), here(in.w, gate), here(in.k, dtype), here(in.v, dtype),
               here(in.a, dtype), here(in.b, dtype), here(in.h0, gate), in.options);
      const auto seen = [](const Tensor& t, DType to) { return t.to(to).to(DType::f64); };
      const reference::Dplr want({seen(in.r, dtype), seen(in.w, gate), seen(in.k, dtype),
                                  seen(in.v, dtype), seen(in.a, dtype), seen(in.b, dtype),
                                  seen(in.h0, gate)});
      const auto last = [&](const Tensor& t) { return t.slice(1, time - 3, time); };
      const double limit = dtype == DType::bf16 ? 8e-3 : 1e-5;
      EXPECT_LE(relative_error(last(y.o.value()), last(want.o)), limit) << time;
      EXPECT_LE(relative_error(y.ht.value(), want.ht), limit) << time;
    }
}

TEST_P(Dplr, InfiniteDecayClearsAChannel) {
  for (const int64_t width : {16, 80}) {
    Inputs in = rwkv_inputs(1, 90, 2, width, width);
    for (const int64_t t : {0, 20, 21, 63, 64, 89})
      in.w.select(1, t).select(2, width - 11).fill_(-std::numeric_limits<double>::infinity());
    Inputs deep = in;  // as good as that, and finite
    deep.w = in.w.clone();
    for (int64_t i = 0; i < deep.w.numel(); ++i)
      deep.w.data<double>()[i] = std::max(deep.w.data<double>()[i], -700.0);
    for (const DType dtype : dtypes()) {
      const std::vector<Tensor> got = run(in, dtype, device()), want = run(deep, dtype, device());
      EXPECT_TRUE(all_values_finite(got));
      expect_results_near(got, want, kNames, 2, 1e-6, 1e-6, name(dtype));
    }
  }
}

// A decay near zero has a gradient far below that of its neighbours; it is no difference of those.
TEST_P(Dplr, GradientOfTinyDecaysIsAccurate) {
  Inputs in = rwkv_inputs(1, 80, 1, 16, 16);
  Draw draw(9);
  for (int64_t t = 3; t < 80; t += 7) in.w.select(1, t).fill_(-18);
  const std::vector<Tensor> got = run(in, DType::f32, device());
  const Inputs rounded{in.r.to(DType::f32).to(DType::f64),  in.w.to(DType::f32).to(DType::f64),
                       in.k.to(DType::f32).to(DType::f64),  in.v.to(DType::f32).to(DType::f64),
                       in.a.to(DType::f32).to(DType::f64),  in.b.to(DType::f32).to(DType::f64),
                       in.h0.to(DType::f32).to(DType::f64), in.d_o.to(DType::f32).to(DType::f64),
                       in.dht.to(DType::f32).to(DType::f64)};
  const std::vector<Tensor> want = run(rounded, DType::f64, {});
  for (int64_t t = 3; t < 80; t += 7)
    EXPECT_LE(relative_error(got[3].select(1, t), want[3].select(1, t)), 1e-4) << t;
}

// What decays before the first token is nothing, and so is the decay's gradient: not the rounding
// of sums that cancel, which an optimizer would blow up to full size.
TEST_P(Dplr, FirstDecayOfNothingHasNoGradient) {
  for (const DType dtype : dtypes())
    for (const double bound : {-0.6066, -4.0, 0.0})
      for (const int64_t time : {1, 70, 130})
        for (const int64_t width : {8, 64, 128}) {
          Inputs in = rwkv_inputs(2, time, 2, width, 32);
          in.h0 = {}, in.options.lower_bound = bound;
          const Tensor dw = run(in, dtype, device())[3];
          EXPECT_EQ(euclidean_norm(dw.slice(1, 0, 1).contiguous()), 0)
              << name(dtype) << " bound " << bound << " T " << time << " K " << width;
          if (time > 1) {
            EXPECT_GT(euclidean_norm(dw.slice(1, 1, time).contiguous()), 0) << name(dtype);
          }
        }
}

// B31: a first token reads nothing but its own value, times r·k. Where the two are nearly
// orthogonal, a score from rounded products of decays is noise, which a norm blows up to full size.
TEST_P(Dplr, B31FirstTokenOfNearlyOrthogonalVectors) {
  for (const DType dtype : dtypes())
    for (const double bound : {-0.6066, -4.0, 0.0})
      for (const int64_t time : {1, 8, 70})
        for (const int64_t width : {16, 64, 128}) {
          Inputs in = rwkv_inputs(1, time, 2, width, 32);
          in.h0.fill_(0);
          in.options.lower_bound = bound;
          double *r = in.r.data<double>(), *k = in.k.data<double>();
          for (int64_t i = 0; i < 2 * width; i += 2) {
            k[i] = r[i + 1], k[i + 1] = -r[i];
            if (i % width == 0) k[i] *= 1.125;
          }
          Inputs seen = in;
          for (Tensor* t : {&seen.r, &seen.k, &seen.v, &seen.a, &seen.b})
            *t = t->to(dtype).to(DType::f64);
          const Tensor want = run(seen, DType::f64, Device())[0].slice(1, 0, 1);
          EXPECT_LE(relative_error(run(in, dtype, device())[0].slice(1, 0, 1), want),
                    dtype == DType::bf16 ? 8e-3 : 2e-5)
              << name(dtype) << " bound " << bound << " T " << time << " K " << width;
        }
}

// Dense views that begin at no 16-byte boundary: wide copies must not be tried on them.
TEST_P(Dplr, AnyAlignment) {
  const DType dtype = dtypes()[1];
  for (const auto& [width, upstream] :
       {std::pair{64, false}, std::pair{64, true}, std::pair{128, false}, std::pair{128, true}}) {
    Inputs in = rwkv_inputs(1, 130, 1, width, width);
    in.options.lower_bound = -0.6066;
    const std::vector<Tensor> want = run(in, dtype, device());
    Inputs moved = in;
    Tensor& t = upstream ? moved.d_o : moved.k;
    const Tensor view =
        Tensor::zeros({t.numel() + 1}, dtype, device()).slice(0, 1, t.numel() + 1).view(t.shape());
    view.copy_(t.to(dtype, device()));
    t = view;
    const double limit = dtype == DType::bf16 ? 1.5e-2 : 1e-12;
    expect_results_near(run(moved, dtype, device()), want, kNames, 2, limit, limit, "");
  }
}

// B08, B10: more heads of sequences than one dimension of a grid holds.
TEST_P(Dplr, ManyHeads) {
  struct Sizes {
    int64_t batch, heads;
  };
  for (const DType dtype : dtypes())
    for (const Sizes size : {Sizes{10923, 6}, Sizes{70000, 1}}) {
      Inputs in = rwkv_inputs(size.batch, 2, size.heads, 8, 8);
      in.options.lower_bound = -0.6066;
      const std::vector<Tensor> all = run(in, dtype, device());
      for (const int64_t first : {int64_t(0), size.batch - 2}) {
        Inputs some = in;
        for (Tensor* t :
             {&some.r, &some.w, &some.k, &some.v, &some.a, &some.b, &some.h0, &some.d_o, &some.dht})
          *t = t->slice(0, first, first + 2);
        const std::vector<Tensor> part = run(some, dtype, device());
        for (size_t i = 0; i < part.size(); ++i)
          EXPECT_TRUE(bitwise_equal(part[i], all[i].slice(0, first, first + 2).contiguous()))
              << kNames[i] << ' ' << first;
      }
    }
}

// What a kernel is given in this dtype, in f64.
Inputs rounded_to(Inputs in, DType dtype) {
  for (Tensor* t : {&in.r, &in.k, &in.v, &in.a, &in.b, &in.d_o}) *t = t->to(dtype).to(DType::f64);
  for (Tensor* t : {&in.w, &in.h0, &in.dht}) *t = t->to(accumulate_type(dtype)).to(DType::f64);
  return in;
}

void expect_exact(const Inputs& in, DType dtype, Device device, const std::string& what) {
  const double outputs = dtype == DType::bf16 ? 8e-3 : dtype == DType::f32 ? 2e-5 : 1e-11;
  expect_results_near(run(in, dtype, device), run(rounded_to(in, dtype), DType::f64, Device()),
                      kNames, 2, outputs, dtype == DType::bf16 ? 1.5e-2 : outputs, what);
}

// Every token erases what stands under the one key and writes its own value: S_t = k v_tᵀ.
TEST_P(Dplr, B06IdenticalKeys) {
  Inputs in = rwkv_inputs(1, 256, 2, 64, 32);
  for (Tensor* t : {&in.w, &in.h0}) t->fill_(0);
  const Tensor key = in.a.slice(1, 0, 1).slice(2, 0, 1).clone();  // a unit vector
  in.a.copy_(key.expand(in.a.shape()));
  for (Tensor* t : {&in.k, &in.b})
    for (int64_t i = 0; i < in.a.numel(); ++i) t->data<double>()[i] = -in.a.data<double>()[i];
  for (const DType dtype : dtypes()) {
    const Inputs seen = rounded_to(in, dtype);
    const Tensor want = seen.v.clone();
    double *o = want.data<double>(), *r = seen.r.data<double>(), *k = seen.k.data<double>();
    for (int64_t row = 0; row < want.numel() / 32; ++row) {
      double read = 0;
      for (int64_t i = 0; i < 64; ++i) read += r[row * 64 + i] * k[row * 64 + i];
      for (int64_t j = 0; j < 32; ++j) o[row * 32 + j] *= read;
    }
    const std::vector<Tensor> got = run(in, dtype, device());
    // A key of rounded numbers has not quite length 1, and that adds up while it is erased.
    EXPECT_LE(relative_error(got[0], want), dtype == DType::bf16 ? 2e-2 : 2e-5) << name(dtype);
    EXPECT_TRUE(all_values_finite(got));
  }
}

TEST_P(Dplr, B18NothingIsReadBehindTheLastToken) {
  for (const int64_t time : {65, 80, 97, 127})
    for (const DType dtype : dtypes()) {
      const Inputs in = rwkv_inputs(1, time, 2, 64, 32);
      Inputs guarded = in;
      for (Tensor* t :
           {&guarded.r, &guarded.w, &guarded.k, &guarded.v, &guarded.a, &guarded.b, &guarded.d_o}) {
        Shape longer = t->shape();
        longer[1] = 192;
        const DType to = t == &guarded.w ? accumulate_type(dtype) : dtype;
        const Tensor view =
            Tensor::full(longer, std::numeric_limits<double>::quiet_NaN(), to, device())
                .slice(1, 0, time);
        view.copy_(t->to(to, device()));
        ASSERT_TRUE(view.is_contiguous());  // so that the kernels see the NaNs behind it
        *t = view;
      }
      const std::vector<Tensor> got = run(guarded, dtype, device()),
                                want = run(in, dtype, device());
      for (size_t i = 0; i < want.size(); ++i)
        EXPECT_TRUE(bitwise_equal(got[i], want[i])) << kNames[i] << ' ' << time << name(dtype);
    }
}

TEST_P(Dplr, B40ValueColumnsAreIndependentAndSummed) {
  const Inputs in = rwkv_inputs(2, 100, 1, 32, 128);
  const auto part = [&](int64_t begin) {
    Inputs p = in;
    for (Tensor* t : {&p.v, &p.h0, &p.d_o, &p.dht}) *t = t->slice(3, begin, begin + 64);
    return run(p, DType::f32, device());
  };
  const std::vector<Tensor> all = run(in, DType::f32, device()), a = part(0), b = part(64);
  for (const size_t i : {0, 1, 5, 8}) {  // o, ht, dv, dh0
    EXPECT_LE(relative_error(all[i].slice(3, 0, 64), a[i]), 1e-6) << kNames[i];
    EXPECT_LE(relative_error(all[i].slice(3, 64, 128), b[i]), 1e-6) << kNames[i];
  }
  for (const size_t i : {2, 3, 4, 6, 7}) {
    const Tensor sum = a[i].clone();
    for (int64_t j = 0; j < sum.numel(); ++j) sum.data<double>()[j] += b[i].data<double>()[j];
    EXPECT_LE(relative_error(all[i], sum), 5e-6) << kNames[i];
  }
}

// Numbers beyond 65504, the largest of half precision, and beside small ones.
TEST_P(Dplr, B42LargeValuesAndUpstreamGradients) {
  for (const DType dtype : dtypes())
    for (const double bound : {-0.6066, 0.0}) {
      Inputs in = rwkv_inputs(1, 200, 1, 64, 64);
      in.options.lower_bound = bound;
      for (Tensor* t : {&in.d_o, &in.dht})
        for (int64_t i = 0; i < t->numel(); ++i) t->data<double>()[i] *= 1e6;
      expect_exact(in, dtype, device(), "upstream 1e6");
      for (Tensor* t : {&in.v, &in.h0})
        for (int64_t i = 0; i < t->numel(); ++i) t->data<double>()[i] *= i % 64 < 8 ? 1e7 : 1e-7;
      expect_exact(in, dtype, device(), "values 1e7 and 1e-7");
    }
}

TEST_P(Dplr, RecomputationAndRerunsChangeNoBit) {
  for (const DType dtype : dtypes())
    for (const int64_t width : {64, 128})
      for (const double bound : {0.0, -0.6066, -4.0}) {
        Inputs in = rwkv_inputs(3, 200, 2, width, width, bound < -1 ? -4 : -0.6065);
        in.options.lower_bound = bound;
        const std::vector<Tensor> first = run(in, dtype, device());
        for (const bool recompute : {false, true}) {
          in.options.recompute = recompute;
          const std::vector<Tensor> again = run(in, dtype, device());
          for (size_t i = 0; i < first.size(); ++i)
            EXPECT_TRUE(bitwise_equal(first[i], again[i])) << kNames[i] << recompute << width;
        }
      }
}

// Chunks only change rounding, and so does the declared bound.
TEST_P(Dplr, ChunkAndBoundDoNotMatter) {
  const DType dtype = device().is_cuda() ? DType::f32 : DType::f64;
  const double limit = device().is_cuda() ? 2e-5 : 1e-11;
  Inputs in = rwkv_inputs(1, 150, 2, 32, 48);
  const std::vector<Tensor> want = run(in, dtype, device());
  for (const int64_t chunk : {16, 32, 128})
    for (const double bound : {0.0, -0.6066}) {
      in.options.chunk = chunk, in.options.lower_bound = bound;
      expect_results_near(run(in, dtype, device()), want, kNames, 2, limit, limit, "");
    }
}

TEST(DplrCpu, ThreadsDoNotChangeABit) {
  const Inputs in = rwkv_inputs(1, 150, 2, 32, 200);
  const int before = omp_get_max_threads();
  std::vector<std::vector<Tensor>> results;
  for (const int threads : {1, 2, 7}) {
    omp_set_num_threads(threads);
    results.push_back(run(in, DType::f32, {}));
  }
  omp_set_num_threads(before);
  for (size_t i = 0; i < results[0].size(); ++i)
    for (const size_t other : {1, 2})
      EXPECT_TRUE(bitwise_equal(results[0][i], results[other][i])) << kNames[i];
}

TEST(DplrCpu, CostOfTheReferenceShape) {
  const DplrSize s{.batch = 8, .time = 4096, .heads = 8, .key_dim = 64, .value_dim = 64};
  // Seven tensors of 16.8 M elements: six in bf16, w in f32.
  EXPECT_NEAR(dplr_cost(Pass::forward, s, DType::bf16, false).bytes, 268e6, 1e6);
  EXPECT_NEAR(dplr_step_cost({.key_dim = 64, .value_dim = 64}, DType::bf16).bytes, 32768, 1100);
}

TEST(DplrCuda, DecaysOutOfRangeRaiseFlags) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const int64_t width : {64, 128}) {
      Inputs in = rwkv_inputs(1, 70, 1, width, 64);
      in.options.lower_bound = -0.6065;
      run(in, dtype, Device::cuda());
      EXPECT_EQ(read_and_clear_device_flags(Device::cuda()), 0u);
      double& w = in.w.data<double>()[67 * width + width - 13];
      w = 0.25;
      run(in, dtype, Device::cuda());
      EXPECT_EQ(read_and_clear_device_flags(Device::cuda()), 1u << int(DeviceFlag::positive_decay));
      w = -0.7;
      run(in, dtype, Device::cuda());
      EXPECT_EQ(read_and_clear_device_flags(Device::cuda()),
                1u << int(DeviceFlag::unbounded_decay));
    }
}

}  // namespace
}  // namespace ebb::testing
