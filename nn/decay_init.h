// Initialisation of decay gates: Random (the public native rule), PoST and DAMI.
//
// A gate has g = -exp(A_log)·softplus(z + dt_bias). With Z the sample of pre-activations z of a
// head on calibration tokens, two quantities describe its memory:
//   timescale    tau = 1 / (exp(A_log)·E[softplus(z + dt_bias)])    in tokens
//   sensitivity  S   = E[sigmoid(z + dt_bias)]                      slope of softplus
// DAMI sets both: heads get a ladder of timescales, layers a profile of sensitivities (DAMI
// equations 10 and 11). Everything here is f64 on the CPU; results are rounded to f32 once.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ebb {

// How a gate turns z + dt_bias into a rate: g = −exp(A_log)·softplus(z + dt_bias), or, RWKV-7's,
// −exp(A_log)·sigmoid(z + dt_bias). The sensitivity is the mean sigmoid of either.
enum class DecayResponse { softplus, sigmoid };

enum class TimescaleLadder { geometric, linear };
// Shapes over depth, low -> high: half_sine and parabola rise and fall; low_high and high_low are
// linear ramps; high_low_high is the half sine upside down.
enum class SensitivityShape { half_sine, parabola, low_high, high_low, high_low_high };

struct DamiOptions {
  double tau_max = 4096;  // tokens; head 0, the slowest
  double tau_min = 1;     // tokens; the last head
  TimescaleLadder ladder = TimescaleLadder::geometric;
  SensitivityShape shape = SensitivityShape::half_sine;
  double low = 0.25, high = 0.75;         // of the profile before shifting
  double shift = 0;                       // added to every layer
  std::optional<double> peak_layer = {};  // half sine with its peak moved to this layer
  uint64_t seed = 42;                     // of the offsets of channels (KDA, GDN2)
};

// tau_h for h = 0..heads-1 [tokens], head 0 the slowest.
std::vector<double> timescale_ladder(const DamiOptions& options, int64_t heads);
// S*_l for l = 0..layers-1; throws when a target leaves (0,1).
std::vector<double> sensitivity_profile(const DamiOptions& options, int64_t layers);

struct HeadGate {
  double dt_bias = 0;  // of the head; channels add their offsets
  double A_log = 0;
  double sensitivity = 0;  // reached, after rounding to f32
  double timescale = 0;    // reached, after rounding to f32
};

// Solves mean sigmoid(z + offset + dt_bias) = sensitivity for dt_bias (bisection), then
// A_log = -ln(timescale) - ln(mean response). z: [tokens, channels] of one head; offsets:
// [channels], what dt_bias of each channel adds to the head's (empty: one channel, none).
HeadGate solve_head(std::span<const double> z, std::span<const double> offsets, double sensitivity,
                    double timescale, DecayResponse response = DecayResponse::softplus);
// What a gate does on a sample: sensitivity and timescale of given parameters.
HeadGate measure_head(std::span<const double> z, std::span<const double> offsets, double dt_bias,
                      double A_log, DecayResponse response = DecayResponse::softplus);

// Native rules. A_log: log U(low,16), never of exactly 0, low 0 for Gated DeltaNet and 1 for KDA
// and GDN2; dt_bias: inverse softplus of exp(U(ln 0.001, ln 0.1)), floored at 1e-4. Element i uses
// counter i of (seed, purpose).
std::vector<float> native_A_log(uint64_t seed, uint64_t purpose, int64_t heads, double low = 0);
// DAMI's offsets of the channels of one head around its dt_bias: N(0, 0.03²), their mean taken out.
std::vector<double> channel_offsets(uint64_t seed, int64_t layer, int64_t head, int64_t channels);
std::vector<float> native_dt_bias(uint64_t seed, uint64_t purpose, int64_t count);
// PoST's spectral control: A_log linear in the head from 0 to ln(train_length), ascending.
std::vector<float> post_A_log(int64_t heads, double train_length = 4096);

double softplus(double x);          // linear above 20, log1p form below
double inverse_softplus(double y);  // y > 0

}  // namespace ebb
