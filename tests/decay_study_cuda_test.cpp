// Every recipe of the decay study on the GPU beside the CPU: logits, loss, all gradients, the
// decays in use and decoding.
#include "autograd/tape.h"
#include "models/decays.h"
#include "tensor/compare.h"
#include "tests/cuda_fixture.h"
#include "tests/decay_recipes.h"

namespace ebb::testing {
namespace {

class DecayStudyCuda : public CudaTest, public ::testing::WithParamInterface<std::string> {
 protected:
  struct Results {
    Tensor logits;
    double loss = 0;
    std::vector<std::pair<std::string, Tensor>> gradients = {};
    DecayUse decays = {};
  };
  Results run(Device at, bool bf16) const {
    const auto model = small_decay_model(GetParam());
    model->to(at);
    if (bf16) model->enable_bf16();
    const Tensor ids = decay_ids(2, 300, 1).to(at), labels = decay_ids(2, 300, 2).to(at);
    Results r;
    r.logits = model->logits(model->hidden(ids)).value().cpu();
    const Var loss = model->loss(ids, labels).loss;
    backward(loss);
    r.loss = loss.value().item();
    for (const NamedParameter& p : model->named_parameters())
      r.gradients.emplace_back(p.name, p.grad().cpu());
    r.decays = measure_decays(*model, decay_ids(1, 300, 1));
    return r;
  }
  void compare(bool bf16, double logits, double gradients, double vectors, double decays) const {
    const Results want = run(Device::cpu(), false), got = run(Device::cuda(), bf16);
    EXPECT_LE(relative_error(got.logits, want.logits), logits);
    EXPECT_NEAR(got.loss / want.loss, 1, bf16 ? 3e-2 : 1e-6);
    for (size_t i = 0; i < want.gradients.size(); ++i) {
      const auto& [name, gradient] = want.gradients[i];
      EXPECT_LE(relative_error(got.gradients[i].second, gradient),
                gradient.dim() == 1 ? vectors : gradients)
          << name;
    }
    ASSERT_EQ(got.decays.layers.size(), want.decays.layers.size());
    for (size_t l = 0; l < want.decays.layers.size(); ++l) {
      const DecaySpread &a = got.decays.layers[l], &b = want.decays.layers[l];
      EXPECT_EQ(a.values, b.values);
      EXPECT_NEAR(a.median, b.median, decays) << l;
      EXPECT_NEAR(a.lower_quartile, b.lower_quartile, decays) << l;
      EXPECT_NEAR(a.upper_quartile, b.upper_quartile, decays) << l;
      EXPECT_NEAR(a.mean, b.mean, decays) << l;
    }
  }
};

// Either side may be off by the limits of whole models against f64.
TEST_P(DecayStudyCuda, F32IsTheCpus) { compare(false, 2e-5, 1e-4, 2e-4, 1e-5); }
TEST_P(DecayStudyCuda, Bf16IsNearTheCpus) { compare(true, 3e-2, 0.12, 0.12, 1e-2); }

TEST_P(DecayStudyCuda, DecodesLikeItReads) {
  const NoGrad off;
  const auto model = small_decay_model(GetParam());
  model->to(Device::cuda());
  const Tensor ids = decay_ids(1, 70, 3).to(Device::cuda());
  const Tensor full = model->logits(model->hidden(ids)).value().select(0, 0).cpu();
  DecodeState state;
  Tensor logits = model->prefill(ids.slice(1, 0, 65), {}, &state);
  for (int64_t t = 65;; ++t) {
    EXPECT_LE(relative_error(logits.select(0, 0).cpu(), full.select(0, t - 1)), 2e-5) << t;
    if (t == 70) break;
    logits = model->step(ids.slice(1, t, t + 1).reshape({1}), &state);
  }
}

INSTANTIATE_TEST_SUITE_P(All, DecayStudyCuda, ::testing::ValuesIn(decay_recipes()),
                         decay_recipe_test_name);

}  // namespace
}  // namespace ebb::testing
