// Reads the vectors in C++17: JSON, and arrays of safetensors. On machines that are little-endian.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {  // null is none of the four
  double number = 0;
  std::string text;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> fields;  // in the order of the file

  const Json* find(const std::string& name) const {
    for (auto& field : fields)
      if (field.first == name) return &field.second;
    return nullptr;
  }
  const Json& operator[](const std::string& name) const {
    if (auto* found = find(name)) return *found;
    throw std::runtime_error("expected the field " + name);
  }
};

inline Json parse(const char*& at) {
  auto next = [&at] { return *(at += std::strspn(at, " \n\t\r,:")); };  // between values, a comma is as good as a space
  Json found;
  const char first = next();
  if (first == '"') {
    for (++at; *at != '"'; ++at) {
      if (*at == '\\') ++at;  // \" and \\ are the only escapes of these files
      found.text += *at;
    }
    ++at;
  } else if (first == '[' || first == '{') {
    for (++at; next() != ']' && *at != '}';) {
      if (first == '[') found.items.push_back(parse(at));
      else {
        std::string name = parse(at).text;
        found.fields.emplace_back(name, parse(at));
      }
    }
    ++at;
  } else if (std::strchr("ntf", first)) {
    at += std::strspn(at, "nulltruefalse");
  } else {
    char* end;
    found.number = std::strtod(at, &end);
    at = end;
  }
  return found;
}

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("expected a file at " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline Json read_json(const std::string& path) {
  const std::string text = contents(path);
  const char* at = text.c_str();
  return parse(at);
}

using Arrays = std::map<std::string, std::vector<double>>;  // in C order, by "problem/name"; a mask holds 0 and 1

template <class T> std::vector<double> numbers(const char* bytes, size_t count) {
  std::vector<T> raw(count);
  std::memcpy(raw.data(), bytes, count * sizeof(T));
  return {raw.begin(), raw.end()};
}

inline Arrays read_safetensors(const std::string& path) {
  const std::string bytes = contents(path);
  std::uint64_t size;
  std::memcpy(&size, bytes.data(), 8);
  const char* at = bytes.data() + 8;
  const char* start = at + size;
  Arrays arrays;
  for (auto& [name, entry] : parse(at).fields) {
    auto& offsets = entry["data_offsets"].items;
    const char* first = start + size_t(offsets[0].number);
    const size_t length = size_t(offsets[1].number - offsets[0].number);
    const std::string& dtype = entry["dtype"].text;
    arrays[name] = dtype == "F64"   ? numbers<double>(first, length / 8)
                   : dtype == "F32" ? numbers<float>(first, length / 4)
                                    : numbers<std::uint8_t>(first, length);
  }
  return arrays;
}
