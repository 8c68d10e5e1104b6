// The optimizer on a GPU: as on the CPU, for any number and size of tensors, and inside a graph.
#include <cmath>

#include "tensor/compare.h"
#include "tensor/event.h"
#include "tensor/graph.h"
#include "tensor/random.h"
#include "tests/cuda_fixture.h"
#include "train/optimizer.h"

namespace ebb::testing {
namespace {

using OptimizerCuda = CudaTest;

Tensor draw(const Shape& shape, uint64_t purpose, double scale = 1) {
  Tensor t = Tensor::empty(shape, DType::f32);
  fill_normal(t, {11, purpose}, 0, scale);
  return t;
}

struct Model {
  std::vector<NamedParameter> parameters;
  std::unique_ptr<AdamW> optimizer;

  Model(const std::vector<Shape>& shapes, Device device, double clip) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Shape& s = shapes[i];
      const WeightDecay decay = s.size() > 1 ? WeightDecay::on : WeightDecay::off;
      parameters.push_back({fmt::format("p{}", i), Parameter(draw(s, i).to(device)), 0,
                            s.empty() ? 1 : s[0], s, decay});
      if (s.size() > 1) parameters.back().parameter.enable_shadow();
    }
    optimizer = std::make_unique<AdamW>(decay_groups(parameters, 0.1),
                                        AdamWConfig{.lr = 1e-2, .clip = clip});
  }
  void set_gradients(int step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Parameter& p = parameters[i].parameter;
      const Tensor g = draw(p.master().shape(), 1000 * uint64_t(step + 1) + i, 0.1);
      if (p.grad().defined())
        p.grad().copy_(g.to(p.master().device()));
      else
        p.set_grad(g.to(p.master().device()));
    }
  }
  std::vector<Tensor> values() const {  // on the CPU
    std::vector<Tensor> out;
    for (const NamedParameter& p : parameters) {
      out.push_back(p.parameter.master().cpu().clone());
      if (p.parameter.shadow()) out.push_back(p.parameter.shadow().cpu().clone());
    }
    for (const auto& [name, t] : optimizer->state_dict()) out.push_back(t.cpu().clone());
    return out;
  }
};

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(bitwise_equal(a[i], b[i])) << i;
}

std::vector<Shape> many_shapes(int count) {
  std::vector<Shape> out;
  for (int i = 0; i < count; ++i)
    out.push_back(i % 3 ? Shape{1 + (i * 37) % 500} : Shape{1 + i % 7, 1 + (i * 13) % 90});
  out[size_t(count / 2)] = {1};
  return out;
}

TEST_F(OptimizerCuda, TenStepsAsOnTheCpu) {
  const std::vector<std::vector<Shape>> models{
      {{1}}, {{3, 5}, {}, {0}, {4097}, {257, 129}, {8192}, {8193}, {3, 8191}}, many_shapes(3000)};
  for (const std::vector<Shape>& shapes : models) {
    Model cpu(shapes, Device::cpu(), 2), gpu(shapes, gpu_, 2);
    for (int step = 0; step < 10; ++step)
      for (Model* m : {&cpu, &gpu}) {
        m->set_gradients(step);
        m->optimizer->set_lr(1e-2 / (step + 1));
        m->optimizer->step();
      }
    const AdamWScalars a = cpu.optimizer->read(), b = gpu.optimizer->read();
    EXPECT_NEAR(b.grad_norm, a.grad_norm, 1e-12 * a.grad_norm);
    EXPECT_NEAR(b.grad_scale, a.grad_scale, 1e-12);
    EXPECT_EQ(b.step, 10);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const Parameter &x = cpu.parameters[i].parameter, &y = gpu.parameters[i].parameter;
      EXPECT_LE(relative_error(y.master().cpu(), x.master()), 1e-6) << i;
      if (y.shadow()) {
        EXPECT_TRUE(bitwise_equal(y.shadow(), y.master().cpu().to(DType::bf16))) << i;
      }
    }
    const StateDict s = cpu.optimizer->state_dict(), t = gpu.optimizer->state_dict();
    for (size_t i = 0; i < s.size(); ++i)
      EXPECT_LE(relative_error(t[i].second.cpu(), s[i].second), 1e-6) << s[i].first;
  }
}

TEST_F(OptimizerCuda, UnalignedTensorsGiveTheSameBits) {
  // Views that start 1 ... 3 elements into a buffer take the scalar path.
  const int64_t n = 20001;
  std::vector<Tensor> results;
  for (const int64_t shift : {0, 1, 2, 3}) {
    const auto at = [&](uint64_t purpose) {
      const Tensor buffer = Tensor::full({n + 8}, 777, DType::f32, gpu_);
      const Tensor view = buffer.slice(0, shift, shift + n);
      view.copy_(draw({n}, purpose).to(gpu_));
      return view;
    };
    const Tensor shadow = Tensor::zeros({n + 8}, DType::bf16, gpu_).slice(0, shift, shift + n);
    AdamWTensor t{at(1), at(2), at(3), at(4), shadow, 0.1, 1};
    t.v.copy_(Tensor::full({n}, 0.5));
    const Tensor scalars = adamw_scalars({.lr = 0.01, .max_norm = 1}, gpu_);
    const Tensor squares = Tensor::empty({}, DType::f64, gpu_);
    sum_of_squares(TensorList({t.grad}), squares);
    adamw_begin(scalars, squares, {});
    adamw(AdamWList({t}), scalars, {});
    const std::vector<Tensor> now{t.master.cpu().clone(), t.m.cpu().clone(), t.v.cpu().clone(),
                                  t.shadow.cpu().clone()};
    if (shift == 0) results = now;
    for (size_t i = 0; i < now.size(); ++i)
      EXPECT_TRUE(bitwise_equal(now[i], results[i])) << shift << " tensor " << i;
    const Tensor whole = Tensor::wrap(t.master.storage(), DType::f32, {n + 8}, {1}, 0).cpu();
    for (int64_t i = 0; i < n + 8; ++i)
      if (i < shift || i >= shift + n) {
        ASSERT_EQ(whole.data<float>()[i], 777) << i;
      }
  }
}

TEST_F(OptimizerCuda, SkippedStepsChangeNothing) {
  Model model({{40, 30}, {1}, {9000}}, gpu_, 1);
  model.set_gradients(0);
  model.optimizer->step();
  int skipped = 0;
  for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)})
    for (const auto& [tensor, element] : {std::pair<size_t, int64_t>{0, 0}, {1, 0}, {2, 8999}}) {
      model.set_gradients(1);
      model.parameters[tensor].parameter.grad().view({-1}).select(0, element).fill_(bad);
      std::vector<Tensor> before = model.values();
      model.optimizer->step();
      std::vector<Tensor> after = model.values();
      before.pop_back(), after.pop_back();  // the counter of skipped steps
      expect_same(after, before);
      EXPECT_EQ(model.optimizer->read().skipped, ++skipped);
    }
  model.set_gradients(2);
  model.optimizer->step();
  EXPECT_EQ(model.optimizer->read().step, 2);
}

TEST_F(OptimizerCuda, ACapturedStepSeesNewGradientsRatesAndCounts) {
  const std::vector<Shape> shapes{{33, 65}, {129}, {1}};
  Model eager(shapes, gpu_, 1), captured(shapes, gpu_, 1);
  GraphCapture graph(gpu_);
  for (int step = 0; step < 6; ++step) {
    for (Model* m : {&eager, &captured}) {
      m->set_gradients(step);
      if (step == 3) m->parameters[1].parameter.grad().slice(0, 5, 6).fill_(NAN);
      m->optimizer->set_lr(1e-2 / (step + 1));
      m->optimizer->grad_divisor().copy_(Tensor::full({}, step + 1, DType::f64));
    }
    eager.optimizer->step();
    eager.optimizer->zero_grad();
    const auto work = [&] {
      captured.optimizer->step();
      captured.optimizer->zero_grad();
    };
    if (step == 0) {
      work();
      graph.capture(work);
    } else {
      graph.replay();
    }
    expect_same(captured.values(), eager.values());
  }
  EXPECT_EQ(captured.optimizer->read().step, 5);
  EXPECT_EQ(captured.optimizer->read().skipped, 1);
  for (const NamedParameter& p : captured.parameters)
    EXPECT_EQ(euclidean_norm(p.parameter.grad().cpu()), 0);
}

TEST_F(OptimizerCuda, GradientsThatMoveUnderCaptureAreRefused) {
  Model model({{33, 65}}, gpu_, 1);
  model.set_gradients(0);
  model.optimizer->step();
  model.parameters[0].parameter.set_grad(Tensor::zeros({33, 65}, DType::f32, gpu_));
  GraphCapture graph(gpu_);
  EXPECT_THROW(graph.capture([&] { model.optimizer->step(); }), Error);
  model.optimizer->step();  // the stream works on
  EXPECT_EQ(model.optimizer->read().step, 2);
}

TEST_F(OptimizerCuda, NormOfAHundredMillionSmallBf16Values) {
  const TensorList list({Tensor::full({100000000}, 1e-3, DType::bf16, gpu_)});
  const Tensor squares = Tensor::empty({}, DType::f64, gpu_);
  sum_of_squares(list, squares);
  EXPECT_NEAR(std::sqrt(squares.item()), 10.0, 0.01);
}

TEST_F(OptimizerCuda, NormIsRepeatableAndAsOnTheCpu) {
  std::vector<Tensor> host, device;
  for (int i = 0; i < 3000; ++i) {
    host.push_back(draw({i == 1500 ? 1 : 1 + (i * 37) % 900}, uint64_t(i)));
    device.push_back(host.back().to(gpu_));
  }
  const Tensor want = Tensor::empty({}, DType::f64);
  sum_of_squares(TensorList(host), want);
  Tensor first;
  for (int run = 0; run < 3; ++run) {
    const Tensor got = Tensor::empty({}, DType::f64, gpu_);
    sum_of_squares(TensorList(device), got);
    EXPECT_NEAR(got.item() / want.item(), 1, 1e-13);
    if (run == 0) first = got;
    EXPECT_TRUE(bitwise_equal(got, first));
  }
}

TEST_F(OptimizerCuda, MoreThanTwoToThe31Elements) {
  const int64_t n = (int64_t(1) << 31) + 4099;
  if (!has_memory(int64_t(40) << 30)) GTEST_SKIP() << "needs 39 GB of GPU memory";
  AdamWTensor t{Tensor::full({n}, 1, DType::f32, gpu_), Tensor::full({n}, 0.5, DType::f32, gpu_),
                Tensor::zeros({n}, DType::f32, gpu_), Tensor::zeros({n}, DType::f32, gpu_),
                Tensor::zeros({n}, DType::bf16, gpu_)};
  const Tensor scalars = adamw_scalars({.lr = 0.25}, gpu_);
  const Tensor squares = Tensor::empty({}, DType::f64, gpu_);
  const TensorList gradients({t.grad});
  sum_of_squares(gradients, squares);
  EXPECT_EQ(squares.item(), 0.25 * double(n));
  adamw_begin(scalars, squares, {});
  adamw(AdamWList({t}), scalars, {});
  for (const int64_t at : {int64_t(0), n / 2, (int64_t(1) << 31) - 1, int64_t(1) << 31, n - 1}) {
    EXPECT_NEAR(t.master.select(0, at).item(), 0.75, 1e-6) << at;
    EXPECT_EQ(t.shadow.select(0, at).item(), 0.75) << at;
  }
  zero_all(gradients);
  EXPECT_EQ(t.grad.select(0, n - 1).item(), 0);
}

TEST_F(OptimizerCuda, Bandwidth) {
  // 100M parameters in 200 matrices: what a step must move, per second.
  std::vector<AdamWTensor> tensors;
  std::vector<Tensor> grads;
  constexpr int64_t kRows = 1000, kColumns = 500;
  for (int i = 0; i < 200; ++i) {
    const Shape s{kRows, kColumns};
    const auto zeros = [&] { return Tensor::zeros(s, DType::f32, gpu_); };
    tensors.push_back({zeros(), Tensor::full(s, 1e-3, DType::f32, gpu_), zeros(), zeros(),
                       Tensor::zeros(s, DType::bf16, gpu_), 0.1, 1});
    grads.push_back(tensors.back().grad);
  }
  const AdamWList list(tensors);
  const TensorList gradients(grads);
  const Tensor scalars = adamw_scalars({.lr = 1e-3, .max_norm = 1}, gpu_);
  const Tensor squares = Tensor::empty({}, DType::f64, gpu_);
  const int64_t items = 200 * kRows * kColumns;
  const auto rate = [&](const Cost& cost, auto work) {
    double best = 1e30;
    for (int run = 0; run < 20; ++run) {
      Event start(gpu_), stop(gpu_);
      start.record();
      work();
      stop.record();
      best = std::min(best, start.milliseconds_until(stop));
    }
    return cost.bytes / best / 1e9;  // TB/s
  };
  const double norm =
      rate(sum_of_squares_cost(items, DType::f32), [&] { sum_of_squares(gradients, squares); });
  adamw_begin(scalars, squares, {});
  const double step = rate(adamw_cost(items, true), [&] { adamw(list, scalars, {}); });
  fmt::print("adamw {:.2f} TB/s, sum_of_squares {:.2f} TB/s\n", step, norm);
  RecordProperty("adamw_tb_per_s", fmt::format("{:.3f}", step));
  RecordProperty("sum_of_squares_tb_per_s", fmt::format("{:.3f}", norm));
  // 70 % of what an H200 moves; other GPUs only report.
  if (device_info(gpu_).name.find("H200") != std::string::npos) {
    EXPECT_GT(step, 0.7 * 4.3);
  }
}

}  // namespace
}  // namespace ebb::testing
