// The Python side of batch normalisation. Included by module.cpp alone.
#pragma once

#include "normalize.hpp"

namespace {

const NormalizeKernels* normalize_kernels = nullptr;

// Reads and checks the arguments (rows, channels, bits); false, with an error set, if they are invalid.
bool rows_of(PyObject* const* args, Rows* n, int* bits) {
  n->rows = PyLong_AsLongLong(args[0]), n->channels = PyLong_AsLongLong(args[1]);
  *bits = static_cast<int>(PyLong_AsLong(args[2]));
  if (PyErr_Occurred()) return false;
  if (n->rows >= 1 && n->channels >= 1 && n->channels <= kMostNormalized && (*bits == 16 || *bits == 32)) return true;
  PyErr_SetString(PyExc_ValueError, "rows, channels and bits that cannot be normalised");
  return false;
}

// normalize_moments(rows, channels, bits, x, mean, squares, threads)
PyObject* normalize_moments(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Rows rows;
  int bits;
  if (!expect(n, 7) || !rows_of(args, &rows, &bits)) return nullptr;
  const void* x = at<void>(args[3]);
  double *mean = at<double>(args[4]), *squares = at<double>(args[5]);
  const int64_t threads = PyLong_AsLongLong(args[6]);
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS
  done = normalize_kernels->moments(rows, bits, x, mean, squares, threads);
  Py_END_ALLOW_THREADS
  if (!done) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// normalize_apply(rows, channels, bits, x, residual or 0, scale, shift, rectify, y, threads)
PyObject* normalize_apply(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Rows rows;
  int bits;
  if (!expect(n, 10) || !rows_of(args, &rows, &bits)) return nullptr;
  const void *x = at<void>(args[3]), *residual = at<void>(args[4]);
  const float *scale = at<float>(args[5]), *shift = at<float>(args[6]);
  const bool rectify = PyObject_IsTrue(args[7]);
  void* y = at<void>(args[8]);
  const int64_t threads = PyLong_AsLongLong(args[9]);
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  normalize_kernels->apply(rows, bits, x, residual, scale, shift, rectify, y, threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// normalize_gradient_sums(rows, channels, bits, gradient, y or 0, x, mean, sum, product, threads)
PyObject* normalize_gradient_sums(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Rows rows;
  int bits;
  if (!expect(n, 10) || !rows_of(args, &rows, &bits)) return nullptr;
  const void *gradient = at<void>(args[3]), *y = at<void>(args[4]), *x = at<void>(args[5]);
  const float* mean = at<float>(args[6]);
  double *sum = at<double>(args[7]), *product = at<double>(args[8]);
  const int64_t threads = PyLong_AsLongLong(args[9]);
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS
  done = normalize_kernels->gradient_sums(rows, bits, gradient, y, x, mean, sum, product, threads);
  Py_END_ALLOW_THREADS
  if (!done) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// normalize_gradient(rows, channels, bits, gradient, y or 0, x, a, b, c, x_gradient, residual_gradient or 0, threads)
PyObject* normalize_gradient(PyObject*, PyObject* const* args, Py_ssize_t n) {
  Rows rows;
  int bits;
  if (!expect(n, 12) || !rows_of(args, &rows, &bits)) return nullptr;
  const void *gradient = at<void>(args[3]), *y = at<void>(args[4]), *x = at<void>(args[5]);
  const float *a = at<float>(args[6]), *b = at<float>(args[7]), *c = at<float>(args[8]);
  void *x_gradient = at<void>(args[9]), *residual_gradient = at<void>(args[10]);
  const int64_t threads = PyLong_AsLongLong(args[11]);
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  normalize_kernels->gradient(rows, bits, gradient, y, x, a, b, c, x_gradient, residual_gradient, threads);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

}  // namespace
