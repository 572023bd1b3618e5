// Attention in C++17, checked against the vectors: g++ -std=c++17 -O2 attention.cpp -o attention && ./attention ..
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>

#include "vectors.hpp"

using Row = std::vector<float>;
const float INF = std::numeric_limits<float>::infinity();

// Output and logsumexp in single precision, one query after the other. Masked keys are never read.
std::map<std::string, Row> attention(const Json& problem, const Arrays& arrays) {
  auto size = [&](const char* letter) { return size_t(problem["sizes"][letter].number); };
  auto array = [&](const char* name) {
    auto found = arrays.find(problem["name"].text + "/" + name);
    return found == arrays.end() ? Row() : Row(found->second.begin(), found->second.end());
  };
  const size_t B = size("B"), H = size("H"), G = size("G"), M = size("M"), N = size("N"), D = size("D"), E = size("E");
  const Row query = array("query"), key = array("key"), value = array("value");
  const Row mask = array("mask"), bias = array("bias"), sinks = array("sinks");
  const float scale = float(problem["scale"].number), softcap = float(problem["softcap"].number);  // 0 stands for null
  Row output(B * H * M * E), logsumexp(B * H * M);
  for (size_t row = 0; row < B * H * M; ++row) {
    const size_t head = row / M, group = head / H * G + head % H * G / H;
    Row scores(N, -INF);
    float largest = sinks.empty() ? -INF : sinks[head % H];
    const float sink = largest;
    for (size_t j = 0; j < N; ++j) {
      if (!mask.empty() && !mask[row * N + j]) continue;
      if (!bias.empty() && bias[row * N + j] == -INF) continue;
      float score = 0;
      for (size_t d = 0; d < D; ++d) score += scale * query[row * D + d] * key[(group * N + j) * D + d];
      if (softcap) score = softcap * std::tanh(score / softcap);
      scores[j] = score + (bias.empty() ? 0 : bias[row * N + j]);
      largest = scores[j] > largest ? scores[j] : largest;
    }
    const float shift = std::isfinite(largest) ? largest : 0;
    float total = std::exp(sink - shift);
    for (float& score : scores) total += score == -INF ? 0 : std::exp(score - shift);
    logsumexp[row] = shift + std::log(total);
    for (size_t j = 0; j < N; ++j)
      for (size_t e = 0; e < E && scores[j] != -INF; ++e)
        output[row * E + e] += std::exp(scores[j] - shift) / total * value[(group * N + j) * E + e];
  }
  return {{"output", output}, {"logsumexp", logsumexp}};
}

// Whether a number is near enough; NaN stands for any number that is not finite.
bool is_right(double got, double expected, double unit, double bound) {
  if (std::isnan(expected)) return !std::isfinite(got);
  return got == expected || std::fabs(got - expected) <= bound * unit;
}

int main(int count, char** words) {
  const std::string folder = count > 1 ? words[1] : "..";
  bool is_any_wrong = false;
  for (const char* group : {"causal", "empty-rows", "grouped", "lengths", "nan-behind-masks", "reproducible-bits",
                            "scores", "sinks", "softcap", "window"}) {
    const Json content = read_json(folder + "/" + group + ".json");
    const Arrays arrays = read_safetensors(folder + "/" + content["arrays"].text);
    std::string wrong;
    size_t right = 0;
    for (const Json& problem : content["problems"].items) {
      bool is_fine = true;
      for (auto& [name, got] : attention(problem, arrays)) {
        const auto& expected = arrays.at(problem["name"].text + "/" + name);
        const auto& unit = arrays.at(problem["name"].text + "/" + name + ".unit");
        const double bound = problem["bounds"][name]["float32"].number;
        for (size_t i = 0; i < got.size(); ++i) is_fine &= is_right(got[i], expected[i], unit[i], bound);
      }
      right += is_fine;
      if (!is_fine) wrong += " " + problem["name"].text;
    }
    is_any_wrong |= !wrong.empty();
    std::cout << group << ": " << right << " of " << content["problems"].items.size() << wrong << "\n";
  }
  return is_any_wrong;
}
