// Views against an oracle that lists, for every logical element, its place in the storage.
#include <gtest/gtest.h>

#include "tensor/check.h"
#include "tests/layouts.h"

namespace ebb::testing {
namespace {

using Places = std::vector<int64_t>;

// Row-major list of storage indices.
Places places(const Tensor& t) {
  Places out;
  const auto* base = static_cast<const uint8_t*>(t.storage()->data);
  for (int64_t i = 0; i < t.numel(); ++i) out.push_back(&element<uint8_t>(t, i) - base);
  return out;
}

// out[index] = in[map(index)] where map acts on index vectors.
template <class Map>
Places gather(const Places& in, const Shape& from, const Shape& to, Map map) {
  Places out;
  std::vector<int64_t> index(size_t(to.size()));
  for (int64_t i = 0; i < to.numel(); ++i) {
    int64_t rest = i;
    for (int d = to.size() - 1; d >= 0; --d) index[size_t(d)] = rest % to[d], rest /= to[d];
    const std::vector<int64_t> source = map(index);
    int64_t at = 0;
    for (int d = 0; d < from.size(); ++d) at = at * from[d] + source[size_t(d)];
    out.push_back(in[size_t(at)]);
  }
  return out;
}

// Whether strides exist that visit `list` in the shape's row-major order.
bool has_strides(const Places& list, const Shape& shape) {
  if (shape.numel() == 0) return true;
  int64_t block = 1;
  for (int d = shape.size() - 1; d >= 0; --d) {
    if (shape[d] > 1) {
      const int64_t stride = list[size_t(block)] - list[0];
      for (int64_t i = 0; i + block < shape.numel(); ++i)
        if (i / block % shape[d] + 1 < shape[d] &&
            list[size_t(i + block)] - list[size_t(i)] != stride)
          return false;
    }
    block *= shape[d];
  }
  return true;
}

std::vector<int64_t> random_factors(Layouts& random, int64_t n) {
  std::vector<int64_t> out;
  while (n > 1) {
    std::vector<int64_t> divisors;
    for (int64_t k = 2; k <= n; ++k)
      if (n % k == 0) divisors.push_back(k);
    out.push_back(divisors[size_t(random.integer(0, int64_t(divisors.size()) - 1))]);
    n /= out.back();
  }
  if (random.coin()) out.insert(out.begin() + random.integer(0, int64_t(out.size())), 1);
  return out;
}

struct Step {  // a view and what the oracle says of it
  Tensor view;
  Places want;
};

Step random_step(Layouts& random, const Tensor& t, const Places& list) {
  const Shape from = t.shape();
  const auto apply = [&](Tensor view, auto map) {
    Places want = gather(list, from, view.shape(), map);
    return Step{std::move(view), std::move(want)};
  };
  const int dims = t.dim();
  const int d = dims ? int(random.integer(0, dims - 1)) : 0;
  switch (dims ? random.integer(0, 6) : 5) {
    case 0: {
      const int64_t begin = random.integer(0, from[d]), end = random.integer(begin, from[d]);
      const int64_t step = random.integer(1, 3);
      return apply(t.slice(d - dims, begin, end, step), [=](std::vector<int64_t> i) {
        i[size_t(d)] = begin + step * i[size_t(d)];
        return i;
      });
    }
    case 1: {
      if (from[d] == 0) break;
      const int64_t at = random.integer(0, from[d] - 1);
      return apply(t.select(d, at), [=](std::vector<int64_t> i) {
        i.insert(i.begin() + d, at);
        return i;
      });
    }
    case 2: {
      const int e = int(random.integer(0, dims - 1));
      return apply(t.transpose(d, e), [=](std::vector<int64_t> i) {
        std::swap(i[size_t(d)], i[size_t(e)]);
        return i;
      });
    }
    case 3: {
      std::vector<int> order;
      for (int k = 0; k < dims; ++k) order.push_back((k + d) % dims);
      return apply(t.permute(order), [=](const std::vector<int64_t>& i) {
        std::vector<int64_t> out(i.size());
        for (size_t k = 0; k < i.size(); ++k) out[size_t(order[k])] = i[k];
        return out;
      });
    }
    case 4: {
      if (from[d] != 1) break;
      if (random.coin())
        return apply(t.squeeze(d), [=](std::vector<int64_t> i) {
          i.insert(i.begin() + d, 0);
          return i;
        });
      Shape wide = from;
      wide[d] = random.integer(0, 3);
      return apply(t.expand(wide), [=](std::vector<int64_t> i) {
        i[size_t(d)] = 0;
        return i;
      });
    }
    case 5: {
      if (dims > 5) break;
      const int at = int(random.integer(0, dims));
      return apply(t.unsqueeze(at), [=](std::vector<int64_t> i) {
        i.erase(i.begin() + at);
        return i;
      });
    }
    default: {
      if (dims > 5) break;
      Shape wide = from;
      wide.insert(0, random.integer(1, 3));
      return apply(t.expand(wide), [](std::vector<int64_t> i) {
        i.erase(i.begin());
        return i;
      });
    }
  }
  return {t, list};
}

TEST(Views, RandomChainsMatchTheOracle) {
  Layouts random(11);
  for (int trial = 0; trial < 2000; ++trial) {
    const Shape shape = random.shape(4, 4);
    Tensor t = Tensor::zeros(shape, DType::u8);
    Places list(size_t(t.numel()));
    std::iota(list.begin(), list.end(), 0);
    for (int k = 0; k < 6; ++k) {
      Step s = random_step(random, t, list);
      ASSERT_TRUE(s.view.same_storage(t));
      ASSERT_EQ(places(s.view), s.want) << t.shape().str() << " to " << s.view.shape().str();
      t = s.view;
      list = s.want;
      if (t.numel() > 2000) break;
    }
    // view() works exactly where strides exist; reshape() always and with the same elements.
    Shape to(random_factors(random, t.numel()));
    if (t.numel() == 0) to = Shape{0, 3};
    if (to.size() && t.numel() > 0 && random.coin()) {
      Shape open = to;
      open[int(random.integer(0, to.size() - 1))] = -1;
      ASSERT_EQ(t.reshape(open).shape(), to);
    }
    if (has_strides(list, to)) {
      ASSERT_NO_THROW(t.view(to)) << t.shape().str() << t.strides().str() << " as " << to.str();
      ASSERT_EQ(places(t.view(to)), list);
      ASSERT_TRUE(t.reshape(to).same_storage(t));
    } else {
      ASSERT_THROW(t.view(to), Error) << t.shape().str() << t.strides().str() << to.str();
      ASSERT_FALSE(t.reshape(to).same_storage(t));
      ASSERT_EQ(t.reshape(to).shape(), to);
    }
    const bool dense = [&] {
      for (size_t i = 0; i < list.size(); ++i)
        if (list[i] != list[0] + int64_t(i)) return false;
      return true;
    }();
    ASSERT_EQ(t.is_contiguous(), dense) << t.shape().str() << t.strides().str();
    const std::vector<int64_t> sorted = [&] {
      std::vector<int64_t> s = list;
      std::sort(s.begin(), s.end());
      return s;
    }();
    const bool repeats = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
    ASSERT_EQ(t.may_overlap_itself(), repeats) << t.shape().str() << t.strides().str();
  }
}

TEST(Views, ReshapeCopiesInLogicalOrder) {
  Layouts random(12);
  for (int trial = 0; trial < 300; ++trial) {
    const Shape shape = random.shape(4, 5);
    const Tensor t = random.strided_or_expanded(shape, DType::i32);
    random.fill(t);
    const Shape to(random_factors(random, t.numel()));
    const Tensor r = t.reshape(to);
    for (int64_t i = 0; i < t.numel(); ++i)
      ASSERT_EQ(element<int32_t>(r, i), element<int32_t>(t, i));
  }
}

TEST(Views, Flatten) {
  const Tensor t = Tensor::arange(24).view({2, 3, 4});
  EXPECT_EQ(t.flatten(0, 1).shape(), (Shape{6, 4}));
  EXPECT_EQ(t.flatten(-2, -1).shape(), (Shape{2, 12}));
  EXPECT_EQ(t.flatten(0, 2).to_vector<int64_t>(), Tensor::arange(24).to_vector<int64_t>());
  EXPECT_EQ(t.transpose(0, 2).flatten(0, 1).select(0, 1).to_vector<int64_t>(),
            (std::vector<int64_t>{4, 16}));
  EXPECT_EQ(t.flatten(1, 1).shape(), t.shape());
  EXPECT_EQ(Tensor::zeros({0, 3}).flatten(0, 1).shape(), (Shape{0}));
}

TEST(Views, ScalarsAndZeroSizes) {
  const Tensor scalar = Tensor::full({}, 3.5);
  EXPECT_EQ(scalar.dim(), 0);
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(scalar.view({1, 1}).shape(), (Shape{1, 1}));
  EXPECT_EQ(scalar.view({-1}).shape(), (Shape{1}));
  EXPECT_EQ(scalar.expand({2, 2}).to_vector<float>(), std::vector<float>(4, 3.5f));
  EXPECT_EQ(scalar.unsqueeze(0).squeeze(-1).dim(), 0);
  const Tensor none = Tensor::zeros({2, 0, 3});
  EXPECT_EQ(none.view({0}).numel(), 0);
  EXPECT_EQ(none.view({-1, 5}).shape(), (Shape{0, 5}));
  EXPECT_EQ(none.transpose(0, 1).view({7, 0}).shape(), (Shape{7, 0}));
  EXPECT_EQ(none.slice(0, 1, 2).select(0, 0).shape(), (Shape{0, 3}));
  EXPECT_TRUE(none.transpose(0, 2).is_contiguous());
  EXPECT_EQ(none.clone().shape(), none.shape());
  EXPECT_TRUE(none.to_vector<float>().empty());
  EXPECT_EQ(Tensor::zeros({1, 3}).expand({0, 3}).numel(), 0);
}

TEST(Views, HugeStepsDoNotOverflow) {
  const Tensor t = Tensor::arange(4);
  EXPECT_EQ(t.slice(0, 1, 4, INT64_MAX).to_vector<int64_t>(), std::vector<int64_t>{1});
  EXPECT_EQ(t.slice(0, 2, 2, INT64_MAX).numel(), 0);
  EXPECT_EQ(t.slice(0, 4, 4).numel(), 0);
}

TEST(Views, ErrorsNameTheOperationAndTheShape) {
  const Tensor t = Tensor::zeros({2, 3});
  const auto message = [](auto fn) -> std::string {
    try {
      fn();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([&] { t.slice(1, 2, 4); }), "slice: [2:4:1] of dimension 1 of [2,3]");
  EXPECT_EQ(message([&] { t.slice(0, 0, 1, 0); }), "slice: [0:1:0] of dimension 0 of [2,3]");
  EXPECT_EQ(message([&] { t.select(0, -1); }), "select: index -1 of dimension 0 of [2,3]");
  EXPECT_EQ(message([&] { t.transpose(0, 2); }),
            "transpose: dimension 2 of a tensor of 2 dimensions");
  EXPECT_EQ(message([&] { t.permute({0, 0}); }), "permute: dimension 0 of [2,3] named twice");
  EXPECT_EQ(message([&] { t.permute({0}); }), "permute: 1 indices for shape [2,3]");
  EXPECT_EQ(message([&] { t.squeeze(1); }), "squeeze: dimension 1 of [2,3] is not 1");
  EXPECT_EQ(message([&] { t.expand({3, 3}); }), "expand: [2,3] to [3,3]");
  EXPECT_EQ(message([&] { t.expand({3}); }), "expand: [2,3] to [3]");
  EXPECT_EQ(message([&] { t.view({4, -1}); }), "view: 6 elements of [2,3] do not fit [4,-1]");
  EXPECT_EQ(message([&] { t.view({7}); }), "view: 6 elements of [2,3] do not fit [7]");
  EXPECT_EQ(message([&] { t.view({-1, -1}); }), "view: more than one -1 in [-1,-1]");
  EXPECT_EQ(message([&] { t.transpose(0, 1).view({6}); }),
            "view: [3,2] with strides [1,3] cannot be seen as [6] without a copy; use reshape");
  EXPECT_EQ(message([&] {
              Tensor::zeros({0}).view({0, -1});
            }),
            "view: 0 elements of [0] do not fit [0,-1]");
}

TEST(Views, SizesBeyond64BitsAreRefused) {
  const int64_t big = int64_t(1) << 40;
  EXPECT_THROW(Tensor::empty({big, big}), Error);
  EXPECT_THROW(Tensor::empty({int64_t(1) << 62}, DType::f64), Error);
  EXPECT_THROW(Tensor::empty({-1}), Error);
  EXPECT_THROW(Tensor::zeros({1}).expand({big, big}), Error);
  EXPECT_THROW(Tensor::zeros({1}).expand({-1}), Error);
  EXPECT_THROW(Tensor::zeros({4}).view({big, big, big}), Error);
  EXPECT_EQ(Tensor::zeros({1}).expand({big}).numel(), big);
  // Also where nothing is held: strides are products of the sizes, too.
  EXPECT_THROW(Tensor::empty({0, big, big}), Error);
  EXPECT_THROW(Tensor::empty({big, big, 0}), Error);
  EXPECT_THROW(Tensor::zeros({0}).view({0, big, big}), Error);
  EXPECT_THROW(Tensor::zeros({0}).view({big, 0, big}), Error);
}

}  // namespace
}  // namespace ebb::testing
