#include <bitset>
#include <cstdint>
#include <cstring>
#include <string>

#include "binding/module.h"
#include "binding/python.h"

namespace nvme_ops {
namespace {

// The codes of pickle's protocol 2 that have an argument: https://docs.python.org/3/library/pickletools.html
enum Code : unsigned char {
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kLong1 = 0x8a,
  kBinFloat = 'G',
  kBinUnicode = 'X',
  kShortBinString = 'U',
  kGlobal = 'c',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kProto = 0x80,
  kStop = '.',
};

class Scan {
public:
  Scan(const unsigned char* data, std::size_t size, const std::bitset<256>& allowed)
      : data_(data), size_(size), allowed_(allowed) {}

  // Returns why the pickle is refused; empty if it is fine.
  std::string run() {
    while (place_ < size_) {
      const unsigned char code = data_[place_++];
      if (!allowed_[code]) return "code " + std::to_string(code) + " is not allowed";
      if (code == kStop) return largest_ >= size_ ? "it numbers more objects than it has" : "";
      if (!skip(code)) break;
    }
    return "it ends too early";
  }

private:
  bool skip(unsigned char code) {
    switch (code) {
      case kBinInt1:
      case kBinGet:
      case kProto:
        return advance(1);
      case kBinPut:
        return put(1);
      case kBinInt2:
        return advance(2);
      case kBinInt:
      case kLongBinGet:
        return advance(4);
      case kLongBinPut:
        return put(4);
      case kBinFloat:
        return advance(8);
      case kLong1:
      case kShortBinString:
        return counted(1);
      case kBinUnicode:
        return counted(4);
      case kGlobal:
        return line() && line();
      default:
        return true;
    }
  }

  bool advance(std::uint64_t bytes) {
    if (bytes > size_ - place_) return false;
    place_ += bytes;
    return true;
  }
  bool number(std::size_t bytes, std::uint64_t* value) {
    *value = 0;
    const unsigned char* const from = data_ + place_;
    if (!advance(bytes)) return false;
    for (std::size_t i = bytes; i-- > 0;) *value = *value << 8 | from[i];
    return true;
  }
  bool counted(std::size_t bytes) {
    std::uint64_t count;
    return number(bytes, &count) && advance(count);
  }
  // Python's reader has a table as long as the largest of these numbers. Pickles that were optimized skip some.
  bool put(std::size_t bytes) {
    std::uint64_t index;
    if (!number(bytes, &index)) return false;
    if (index > largest_) largest_ = index;
    return true;
  }
  bool line() {
    const void* const end = std::memchr(data_ + place_, '\n', size_ - place_);
    if (end == nullptr) return false;
    place_ = static_cast<std::size_t>(static_cast<const unsigned char*>(end) - data_) + 1;
    return true;
  }

  const unsigned char* const data_;
  const std::size_t size_;
  const std::bitset<256>& allowed_;
  std::size_t place_ = 0;
  std::uint64_t largest_ = 0;
};

}  // namespace

PyObject* scan_pickle(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject *content, *codes;
    if (!PyArg_ParseTuple(arguments, "SS", &content, &codes)) throw PythonError();
    std::bitset<256> allowed;
    const char* const names = PyBytes_AsString(codes);
    for (Py_ssize_t i = 0; i < PyBytes_Size(codes); ++i) allowed.set(static_cast<unsigned char>(names[i]));
    Scan scan(reinterpret_cast<const unsigned char*>(PyBytes_AsString(content)),
              static_cast<std::size_t>(PyBytes_Size(content)), allowed);
    return PyUnicode_FromString(scan.run().c_str());
  });
}

}  // namespace nvme_ops
