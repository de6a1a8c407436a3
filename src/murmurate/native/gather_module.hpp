// The Python side of copies out of a replay's storage, at once or in the background. Included by module.cpp alone.
#pragma once

#include "background_thread.hpp"

namespace {

const char* kBackgroundThread = "murmurate.background_thread";

struct Gather {
  const char* base;
  int64_t stride, bytes;
  const int64_t* index;
  int64_t count;
  char* out;

  void operator()() const { gather(base, stride, bytes, index, count, out); }
};

// args: (base, stride, bytes, index, count, out). The caller checks whether an error is set.
Gather gather_of(PyObject* const* args) {
  return {at<char>(args[0]),    PyLong_AsLongLong(args[1]), PyLong_AsLongLong(args[2]),
          at<int64_t>(args[3]), PyLong_AsLongLong(args[4]), at<char>(args[5])};
}

struct Split {
  static constexpr Py_ssize_t kMost = 64;
  const char* base;
  int64_t stride;
  const int64_t* index;
  int64_t count, field_count;
  Field fields[kMost];

  void operator()() const { split(base, stride, index, count, fields, field_count); }
};

// args: (base, stride, index, count, places, out); places are pairs (offset, bytes) of int64, one for each address in
// the tuple `out`. Returns whether they could be read; if not, an error is set.
bool split_of(PyObject* const* args, Split* work) {
  const int64_t* places = at<int64_t>(args[4]);
  work->base = at<char>(args[0]);
  work->stride = PyLong_AsLongLong(args[1]);
  work->index = at<int64_t>(args[2]);
  work->count = PyLong_AsLongLong(args[3]);
  work->field_count = PyTuple_Size(args[5]);
  if (PyErr_Occurred()) return false;
  if (work->field_count > Split::kMost) {
    PyErr_Format(PyExc_ValueError, "a row has at most %zd fields", Split::kMost);
    return false;
  }
  for (Py_ssize_t k = 0; k < work->field_count; ++k)
    work->fields[k] = {places[2 * k], places[2 * k + 1], at<char>(PyTuple_GetItem(args[5], k))};
  return !PyErr_Occurred();
}

// gather(base, stride, bytes, index, count, out)
PyObject* gather_rows(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  const Gather work = gather_of(args);
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  work();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// split(base, stride, index, count, places, out)
PyObject* split_rows(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  Split work;
  if (!split_of(args, &work)) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  work();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

BackgroundThread* background_thread_of(PyObject* capsule) {
  return static_cast<BackgroundThread*>(PyCapsule_GetPointer(capsule, kBackgroundThread));
}

// background_thread() -> a background thread that gathers and splits; it ends when the returned capsule is freed
PyObject* make_background_thread(PyObject*, PyObject*) {
  BackgroundThread* thread = new (std::nothrow) BackgroundThread;
  if (!thread) return PyErr_NoMemory();
  PyObject* capsule = PyCapsule_New(thread, kBackgroundThread, [](PyObject* freed) {
    BackgroundThread* owned = background_thread_of(freed);
    if (owned->in_owner_process()) delete owned;
  });
  if (!capsule) delete thread;
  return capsule;
}

// Returns the number of the work, for `await_background_thread`. Until then the caller keeps the memory that the work
// uses.
template <typename Work>
PyObject* later(PyObject* capsule, const Work& work) {
  BackgroundThread* thread = background_thread_of(capsule);
  if (!thread) return nullptr;
  try {
    return PyLong_FromLongLong(thread->submit(work));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// gather_later(thread, base, stride, bytes, index, count, out) -> number
PyObject* gather_later(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 7)) return nullptr;
  const Gather work = gather_of(args + 1);
  return PyErr_Occurred() ? nullptr : later(args[0], work);
}

// split_later(thread, base, stride, index, count, places, out) -> number
PyObject* split_later(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 7)) return nullptr;
  Split work;
  return split_of(args + 1, &work) ? later(args[0], work) : nullptr;
}

// await_background_thread(thread, number): returns when all work up to that number is done
PyObject* await_background_thread(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 2)) return nullptr;
  BackgroundThread* thread = background_thread_of(args[0]);
  const int64_t number = PyLong_AsLongLong(args[1]);
  if (!thread || PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  thread->wait(number);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

}  // namespace
