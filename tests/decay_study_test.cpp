// Every recipe of the decay study: it is whole, and its model learns.
#include <gtest/gtest.h>

#include "autograd/tape.h"
#include "tensor/compare.h"
#include "tests/decay_recipes.h"
#include "train/step.h"

namespace ebb::testing {
namespace {

class DecayRecipe : public ::testing::TestWithParam<std::string> {};

TEST_P(DecayRecipe, IsNamedAsItsFolderAndOfTheSize) {
  const TrainConfig c = decay_recipe(GetParam(), false);
  EXPECT_EQ(c.out, "runs/decay/" + GetParam());
  EXPECT_EQ(c.model.hidden_size, 768);
  EXPECT_EQ(c.model.num_hidden_layers, 12);
  EXPECT_EQ(c.model.vocab_size, 50432);
  EXPECT_EQ(c.dtype, DType::bf16);
  const bool dplr = GetParam().starts_with("dplr-");
  EXPECT_EQ(c.model.token_mixer, dplr ? "dplr" : "linear");
  const bool cosine = GetParam().starts_with("cosine-");
  EXPECT_EQ(c.model.rpe == "rope", cosine || GetParam().starts_with("rope-"));
  EXPECT_EQ(c.model.rope_cosine, cosine);
  EXPECT_EQ(c.model.rpe == "tpe", GetParam().starts_with("tpe-"));
  EXPECT_EQ(c.model.decay.by_channel, GetParam().find("scalar") == std::string::npos);
  EXPECT_EQ(c.model.decay.share, GetParam().starts_with("share-"));
}

TEST_P(DecayRecipe, LearnsABatch) {
  const auto model = small_decay_model(GetParam());
  const Batch batch{decay_ids(2, 40, 1), decay_ids(2, 40, 2), {}};
  AdamW optimizer(decay_groups(model->named_parameters(), 0.1), {.clip = 1});
  const double first = train_step(*model, optimizer, batch, 3e-3).loss;
  for (const NamedParameter& p : model->named_parameters())
    EXPECT_GT(euclidean_norm(p.grad()), 0) << p.name;
  double last = first;
  for (int i = 0; i < 15; ++i) last = train_step(*model, optimizer, batch, 3e-3).loss;
  EXPECT_LT(last, 0.7 * first);
}

// What stands before the first block is not made again, and its gradients are those all the same.
TEST(DecayStudy, RecomputingBlocksChangesNothing) {
  std::vector<std::vector<Tensor>> gradients;
  for (const bool again : {false, true}) {
    const auto model = small_decay_model("tpe-vector-simple");
    model->set_recompute(again);
    backward(model->loss(decay_ids(2, 40, 1), decay_ids(2, 40, 2)).loss);
    gradients.emplace_back();
    for (const NamedParameter& p : model->named_parameters())
      gradients.back().push_back(p.grad().clone());
  }
  for (size_t i = 0; i < gradients[0].size(); ++i)
    EXPECT_TRUE(bitwise_equal(gradients[0][i], gradients[1][i])) << i;
}

INSTANTIATE_TEST_SUITE_P(All, DecayRecipe, ::testing::ValuesIn(decay_recipes()),
                         decay_recipe_test_name);

}  // namespace
}  // namespace ebb::testing
