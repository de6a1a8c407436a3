// The Python side of the topic kernels; arguments are addresses and numbers, as module.cpp says, which includes it.
#pragma once

#include "topics.hpp"

namespace {

const TopicKernels* topic_kernels = nullptr;

// expected_topics(x, width, topics, row, rows, scale, offset, factor, beta)
PyObject* expected_topics(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 9)) return nullptr;
  const float* x = at<float>(args[0]);
  const int64_t width = PyLong_AsLongLong(args[1]), topics = PyLong_AsLongLong(args[2]);
  const int64_t* row = at<int64_t>(args[3]);
  const int64_t rows = PyLong_AsLongLong(args[4]);
  const float scale = static_cast<float>(PyFloat_AsDouble(args[5]));
  const float offset = static_cast<float>(PyFloat_AsDouble(args[6]));
  const float* factor = at<float>(args[7]);
  float* beta = at<float>(args[8]);
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  topic_kernels->expected(x, width, topics, row, rows, scale, offset, factor, beta);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// fold_in(starts, word, times, count, beta, width, topics, alpha, iterations, tolerance, gamma, statistics)
// -> total number of iterations of all documents
PyObject* fold_in(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 12)) return nullptr;
  Documents documents;
  documents.starts = at<int64_t>(args[0]);
  documents.word = at<int32_t>(args[1]);
  documents.times = at<float>(args[2]);
  documents.count = PyLong_AsLongLong(args[3]);
  const float* beta = at<float>(args[4]);
  const int64_t width = PyLong_AsLongLong(args[5]), topics = PyLong_AsLongLong(args[6]);
  const float* alpha = at<float>(args[7]);
  const int64_t iterations = PyLong_AsLongLong(args[8]);
  const float tolerance = static_cast<float>(PyFloat_AsDouble(args[9]));
  float* gamma = at<float>(args[10]);
  float* statistics = at<float>(args[11]);
  if (PyErr_Occurred()) return nullptr;
  documents.longest = 0;  // the working memory is for the longest document
  for (int64_t d = 0; d < documents.count; ++d) {
    const int64_t words = documents.starts[d + 1] - documents.starts[d];
    if (words > documents.longest) documents.longest = words;
  }
  const std::size_t room = static_cast<std::size_t>(documents.longest * (width + 1) + 2 * width);
  std::unique_ptr<float[]> work(new (std::nothrow) float[room]);
  if (!work) return PyErr_NoMemory();
  int64_t done;
  Py_BEGIN_ALLOW_THREADS
  done = topic_kernels->fold_in(documents, beta, width, topics, alpha, iterations, tolerance, work.get(), gamma,
                                statistics);
  Py_END_ALLOW_THREADS
  return PyLong_FromLongLong(done);
}

// add_rows(x, width, row, rows, values, step)
PyObject* add_rows(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  float* x = at<float>(args[0]);
  const int64_t width = PyLong_AsLongLong(args[1]);
  const int64_t* row = at<int64_t>(args[2]);
  const int64_t rows = PyLong_AsLongLong(args[3]);
  const float* values = at<float>(args[4]);
  const float step = static_cast<float>(PyFloat_AsDouble(args[5]));
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS
  topic_kernels->add_rows(x, width, row, rows, values, step);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

}  // namespace
