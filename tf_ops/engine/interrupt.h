// Signals that arrive while threads of this process wait for other ranks.
//
// Python runs signal handlers on its main thread, between two bytecodes: never while that thread waits in native code.
// A wait on the caller's thread therefore looks every kLookForSignals_s whether a handler raises an exception. A wait
// elsewhere (a graph of TensorFlow, whose caller waits inside of TensorFlow) is added here, and
// hvd_ext/job/interrupts.py ends it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace hvd_ext {

constexpr double kLookForSignals_s = 0.1;

class Interrupts {
 public:
  // Runs the Python handlers of the signals that have arrived. Does nothing on other threads than Python's main thread,
  // and without Python. True: a handler has raised an exception. The caller stops waiting and returns an error; Python
  // raises the exception in its place. The caller holds no lock, because a handler may call hvd_ext.
  static bool HandlerRaises();

  // Called by a handler on Python's main thread. Where Python runs the constructor of an error of TensorFlow's, it
  // raises KeyboardInterrupt right after the constructor and returns true. TensorFlow would replace an exception of the
  // constructor by a RuntimeError ("pybind11::error_already_set").
  static bool RaiseAfterError();

  // `end` ends a wait, on any thread, also after Remove.
  static int64_t Add(std::function<void()> end);
  static void Remove(int64_t number);
  static void EndAll();
};

inline std::string Interrupted(const std::string& what) {
  return what + ": interrupted by a signal while it waited for other ranks";
}

}  // namespace hvd_ext
