#include "engine/interrupt.h"

#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace hvd_ext {
namespace {

using Object = void*;  // PyObject*

// The part of Python's C interface that is needed, where this process has one. The engine is not linked with Python.
struct Python {
  // A symbol of this process as a pointer of whatever type.
  struct Symbol {
    void* address;
    template <typename Pointer>
    operator Pointer() const {  // NOLINT: its use has the type
      return reinterpret_cast<Pointer>(address);
    }
  };
  Symbol Find(const char* name) {
    Symbol symbol{dlsym(RTLD_DEFAULT, name)};
    complete &= symbol.address != nullptr;
    return symbol;
  }

  bool complete = true;  // above what Find finds
  int (*IsInitialized)() = Find("Py_IsInitialized");
  int (*EnsureState)() = Find("PyGILState_Ensure");
  void (*ReleaseState)(int) = Find("PyGILState_Release");
  int (*CheckSignals)() = Find("PyErr_CheckSignals");
  void (*Fetch)(Object*, Object*, Object*) = Find("PyErr_Fetch");
  void (*Restore)(Object, Object, Object) = Find("PyErr_Restore");
  int (*AddPendingCall)(int (*)(void*), void*) = Find("Py_AddPendingCall");
  Object (*GetFrame)() = Find("PyEval_GetFrame");
  Object (*GetCaller)(Object) = Find("PyFrame_GetBack");
  Object (*GetCode)(Object) = Find("PyFrame_GetCode");
  Object (*GetAttribute)(Object, const char*) = Find("PyObject_GetAttrString");
  const char* (*AsUtf8)(Object) = Find("PyUnicode_AsUTF8");
  void (*Decrement)(Object) = Find("Py_DecRef");
  void (*Increment)(Object) = Find("Py_IncRef");
  Object* KeyboardInterrupt = Find("PyExc_KeyboardInterrupt");
};

const Python& ThePython() {
  static const Python python;
  return python;
}

struct Exception {
  Object type = nullptr, value = nullptr, traceback = nullptr;
};

bool IsOfErrors(Object frame) {
  const Python& python = ThePython();
  Object code = python.GetCode(frame);
  Object file = python.GetAttribute(code, "co_filename");
  const char* name = file == nullptr ? nullptr : python.AsUtf8(file);
  const bool is = name != nullptr && std::strstr(name, "errors_impl.py") != nullptr;
  if (file != nullptr) python.Decrement(file);
  python.Decrement(code);
  return is;
}

// Whether Python runs a function of the file with TensorFlow's errors, or what it has called.
bool MakesError() {
  const Python& python = ThePython();
  Object frame = python.GetFrame();  // borrowed, the others are not
  if (frame != nullptr) python.Increment(frame);
  bool makes = false;
  while (frame != nullptr) {
    makes |= IsOfErrors(frame);
    Object caller = makes ? nullptr : python.GetCaller(frame);
    python.Decrement(frame);
    frame = caller;
  }
  return makes;
}

// A pending call: Python makes it on its main thread, between two bytecodes, and -1 says that an exception is set.
int Raise(void* kept) {
  const Python& python = ThePython();
  if (MakesError() && python.AddPendingCall(Raise, kept) == 0) return 0;
  auto* exception = static_cast<Exception*>(kept);
  python.Restore(exception->type, exception->value, exception->traceback);
  delete exception;
  return -1;
}

void RaiseKept(Exception* exception) {
  if (ThePython().AddPendingCall(Raise, exception) != 0) Raise(exception);  // too many are pending
}

// Never destroyed: at exit a thread of TensorFlow may still end an op.
struct Waits {
  std::mutex mutex;
  std::map<int64_t, std::function<void()>> ends;  // by number
  int64_t last = 0;
};

Waits& TheWaits() {
  static auto* waits = new Waits;
  return *waits;
}

}  // namespace

bool Interrupts::HandlerRaises() {
  const Python& python = ThePython();
  if (!python.complete || python.IsInitialized() == 0) return false;
  const int state = python.EnsureState();
  const bool raises = python.CheckSignals() != 0;
  if (raises) {
    // The caller's error would replace the exception, so that it is kept until the caller has returned.
    auto* exception = new Exception;
    python.Fetch(&exception->type, &exception->value, &exception->traceback);
    RaiseKept(exception);
  }
  python.ReleaseState(state);
  return raises;
}

bool Interrupts::RaiseAfterError() {
  const Python& python = ThePython();
  if (!python.complete) return false;
  const int state = python.EnsureState();
  const bool makes_error = MakesError();
  if (makes_error) {
    auto* exception = new Exception;
    exception->type = *python.KeyboardInterrupt;
    python.Increment(exception->type);
    RaiseKept(exception);
  }
  python.ReleaseState(state);
  return makes_error;
}

int64_t Interrupts::Add(std::function<void()> end) {
  Waits& waits = TheWaits();
  std::lock_guard<std::mutex> lock(waits.mutex);
  waits.ends[++waits.last] = std::move(end);
  return waits.last;
}

void Interrupts::Remove(int64_t number) {
  std::function<void()> removed;  // destroyed without the lock
  Waits& waits = TheWaits();
  std::lock_guard<std::mutex> lock(waits.mutex);
  auto found = waits.ends.find(number);
  if (found == waits.ends.end()) return;
  removed = std::move(found->second);
  waits.ends.erase(found);
}

void Interrupts::EndAll() {
  std::vector<std::function<void()>> ends;
  {
    Waits& waits = TheWaits();
    std::lock_guard<std::mutex> lock(waits.mutex);
    for (const auto& [number, end] : waits.ends) ends.push_back(end);
  }
  for (const auto& end : ends) end();  // each removes itself
}

}  // namespace hvd_ext
