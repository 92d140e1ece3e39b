// The keyword arguments of a call from Python, read where they are used, by name: `p.rows = a["rows"]`.
//
// TypeError with the function's and the argument's name for one that is missing, that nobody reads, or that does not fit its target: a
// pointer takes an address, an integer what it can hold, a floating-point number any number.
#pragma once

#include <cuda_runtime.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace dsv4 {

namespace py = pybind11;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Names in the order in which a function reads them, as Python has them: a call makes no string.
struct ArgumentNames {
  const char* function;
  std::vector<std::pair<const char*, PyObject*>> known = {};

  PyObject* find(size_t i, const char* name) {
    if (i < known.size() && known[i].first == name) return known[i].second;
    for (const auto& [text, object] : known)
      if (text == name) return object;
    known.emplace_back(name, PyUnicode_InternFromString(name));
    return known.back().second;
  }
};

class Argument {
 public:
  Argument(const char* function, const char* name, PyObject* value) : function_(function), name_(name), value_(value) {}

  template <typename T>
  operator T() const {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(integer<uintptr_t>("an address"));
    } else if constexpr (std::is_same_v<T, bool>) {
      if (!PyBool_Check(value_)) refuse("True or False");
      return value_ == Py_True;
    } else if constexpr (std::is_floating_point_v<T>) {
      const double number = PyFloat_AsDouble(value_);
      if (number == -1. && PyErr_Occurred()) refuse("a number");
      return static_cast<T>(number);
    } else {
      static_assert(std::is_integral_v<T>);
      return integer<T>(sizeof(T) == 8 ? "an integer of 64 bits" : "an integer of 32 bits");
    }
  }
  std::string text() const {
    const char* characters = PyUnicode_Check(value_) ? PyUnicode_AsUTF8(value_) : nullptr;
    if (characters == nullptr) refuse("a str");
    return characters;
  }

 private:
  template <typename T>
  T integer(const char* what) const {
    if constexpr (std::is_signed_v<T>) {
      const long long number = PyLong_AsLongLong(value_);
      if ((number == -1 && PyErr_Occurred()) || number < std::numeric_limits<T>::min() || number > std::numeric_limits<T>::max()) refuse(what);
      return static_cast<T>(number);
    } else {
      const unsigned long long number = PyLong_AsUnsignedLongLong(value_);
      if ((number == ~0ull && PyErr_Occurred()) || number > std::numeric_limits<T>::max()) refuse(what);
      return static_cast<T>(number);
    }
  }
  [[noreturn]] void refuse(const char* expected) const {
    PyErr_Clear();
    throw py::type_error(std::string(function_) + ": argument " + name_ + " must be " + expected + ", got " + std::string(py::repr(value_)));
  }

  const char *function_, *name_;
  PyObject* value_;
};

// What every launch of an operator takes.
struct LaunchArguments {
  bool pdl;
  cudaStream_t stream;
};

class Arguments {
 public:
  Arguments(ArgumentNames& names, const py::kwargs& given) : names_(names), given_(given) {}

  Argument operator[](const char* name) {
    PyObject* const value = find(name);
    if (value == nullptr) throw py::type_error(std::string(names_.function) + ": argument " + name + " is missing");
    return {names_.function, name, value};
  }
  template <typename T>
  T get(const char* name, T otherwise) {
    PyObject* const value = find(name);
    return value == nullptr ? otherwise : static_cast<T>(Argument(names_.function, name, value));
  }
  LaunchArguments last() {
    const LaunchArguments last = {(*this)["pdl"], (*this)["stream"]};
    done();
    return last;
  }
  // After the last one is read, before anything is done.
  void done() const {
    if (found_ == given_.size()) return;
    for (const auto& [name, value] : given_) {
      bool read = false;
      for (size_t i = 0; i < names_.known.size(); ++i) read = read || name.equal(py::handle(names_.known[i].second));
      if (!read) throw py::type_error(std::string(names_.function) + ": takes no argument " + std::string(py::str(name)));
    }
  }

 private:
  PyObject* find(const char* name) {
    PyObject* const value = PyDict_GetItemWithError(given_.ptr(), names_.find(read_++, name));
    if (value != nullptr) ++found_;
    return value;
  }

  ArgumentNames& names_;
  const py::kwargs& given_;
  size_t read_ = 0, found_ = 0;
};

// m.function(**arguments), which call(Arguments&) reads.
template <typename Call>
void define(py::module_& m, const char* function, Call call) {
  m.def(function, [call, names = new ArgumentNames{function}](const py::kwargs& given) {  // for as long as the module: for ever
    Arguments arguments(*names, given);
    return call(arguments);
  });
}

}  // namespace dsv4
