// The Python side of the kernels. Their arguments are numbers, most of them addresses of tensors' memory, because such
// calls are cheapest: the caller checks shapes and keeps the memory alive. Functions that also take tensors check them
// here.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>

#include "gather.hpp"
#include "kernels.hpp"
#include "tensors.hpp"

namespace {

using namespace murmurate;

const Kernels* kernels = nullptr;
const char* kTree = "murmurate.tree";
constexpr std::size_t kAlign = 64;

// Whether this machine runs code for the instruction set `name`.
bool runs(const char* name) {
#if defined(MURMURATE_X86)
  __builtin_cpu_init();
  if (!std::strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma");
  if (!std::strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return !std::strcmp(name, "portable");
}

// The table of kernels that was built for the instruction set `name`.
template <typename Table>
const Table* built_for(const char* name, const Table& portable, const Table* avx2, const Table* avx512) {
  if (!std::strcmp(name, "avx512")) return avx512;
  if (!std::strcmp(name, "avx2")) return avx2;
  return &portable;
}

#if defined(MURMURATE_X86)
#define BUILDS(tables) tables##Portable, &tables##Avx2, &tables##Avx512
#else
#define BUILDS(tables) tables##Portable, nullptr, nullptr
#endif

int64_t lines_for(int64_t numbers) { return (numbers + kLine - 1) / kLine; }

// Fills `tree` with addresses in the memory that begins at `base`; returns how many bytes the tree takes.
int64_t lay_out(Tree& tree, int64_t capacity, char* base) {
  std::memset(&tree, 0, sizeof tree);
  tree.capacity = capacity;
  int level = 0;
  int64_t numbers = capacity;
  for (;; ++level) {
    tree.lines[level] = lines_for(numbers);
    if (level > 0 && tree.lines[level] == 1) break;
    numbers = tree.lines[level];
  }
  tree.top = level;
  int64_t used = 0;  // bytes
  auto take = [&](int64_t lines) {
    float* taken = reinterpret_cast<float*>(base + used);
    used += lines * kLine * static_cast<int64_t>(sizeof(float));
    return taken;
  };
  tree.lines[tree.top + 1] = 1;
  for (level = tree.top; level > 0; --level) tree.before[level] = take(tree.lines[level]);  // searches read these
  for (level = tree.top + 1; level >= 0; --level) {
    tree.raw[level] = take(tree.lines[level]);
    if (level > 0) tree.least[level] = take(tree.lines[level]);
  }
  return used;
}

Tree* tree_of(PyObject* capsule) { return static_cast<Tree*>(PyCapsule_GetPointer(capsule, kTree)); }

bool expect(Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", given, wanted);
  return false;
}

template <typename T>
T* at(PyObject* address) {
  return reinterpret_cast<T*>(PyLong_AsSize_t(address));
}

// Two vectors of the same length, given as two tensors or as two addresses; for addresses `count` is their length, and
// for tensors it is set. False for tensors that are not two contiguous vectors of these kinds and of equal length in
// host memory.
template <typename A, typename B>
bool two_vectors(PyObject* first, Kind one, A** a, PyObject* second, Kind another, B** b, int64_t* count) {
  if (PyLong_Check(first)) {
    *a = at<A>(first), *b = at<B>(second);
    return true;
  }
  int64_t other_count;
  return is_vector(first, one, a, count) && is_vector(second, another, b, &other_count) && *count == other_count;
}

bool has_leaves(int64_t capacity) {
  if (capacity >= 1 && capacity <= kMostLeaves) return true;
  if (capacity < 1)
    PyErr_SetString(PyExc_ValueError, "a tree has at least one leaf");
  else
    PyErr_Format(PyExc_ValueError, "a compiled tree has at most %lld leaves, not %lld: use a smaller capacity",
                 static_cast<long long>(kMostLeaves), static_cast<long long>(capacity));
  return false;
}

// tree_bytes(capacity) -> bytes of memory that tree() needs, 64-byte aligned and zero at first
PyObject* tree_bytes(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 1)) return nullptr;
  Tree tree;
  const int64_t capacity = PyLong_AsLongLong(args[0]);
  if (PyErr_Occurred() || !has_leaves(capacity)) return nullptr;
  return PyLong_FromLongLong(lay_out(tree, capacity, nullptr));
}

void free_tree(PyObject* capsule) { delete tree_of(capsule); }

// tree(address, capacity, fresh) -> capsule; fresh: the memory is zero and has to be initialised
PyObject* make_tree(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 3)) return nullptr;
  char* base = at<char>(args[0]);
  const int64_t capacity = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred() || !has_leaves(capacity)) return nullptr;
  if (reinterpret_cast<std::size_t>(base) % kAlign) {
    PyErr_SetString(PyExc_ValueError, "the memory of a tree begins at a multiple of 64 bytes");
    return nullptr;
  }
  Tree* tree = new (std::nothrow) Tree;
  if (!tree) return PyErr_NoMemory();
  lay_out(*tree, capacity, base);
  if (PyObject_IsTrue(args[2])) {
    for (int level = 1; level <= tree->top + 1; ++level)
      for (int64_t i = 0; i < tree->lines[level] * kLine; ++i)
        tree->least[level][i] = std::numeric_limits<float>::infinity();
  }
  PyObject* capsule = PyCapsule_New(tree, kTree, free_tree);
  if (!capsule) delete tree;
  return capsule;
}

// The first i whose index or priority is invalid, or -1.
int64_t first_invalid(const Tree& tree, const int64_t* index, const float* priority, int64_t count) {
  bool wrong = false;
  for (int64_t i = 0; i < count; ++i)
    wrong |= index[i] < 0 || index[i] >= tree.capacity ||
             !(priority[i] >= 0.0f && priority[i] <= std::numeric_limits<float>::max());
  if (!wrong) return -1;
  for (int64_t i = 0;; ++i)
    if (index[i] < 0 || index[i] >= tree.capacity ||
        !(priority[i] >= 0.0f && priority[i] <= std::numeric_limits<float>::max()))
      return i;
}

// set(tree, index, priority, count) -> -1; or the position of the first invalid one, and nothing was set; or
// None for tensors that `two_vectors` refuses. count is ignored for tensors.
PyObject* set(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 4)) return nullptr;
  const Tree* tree = tree_of(args[0]);
  if (!tree) return nullptr;
  int64_t* index;
  float* priority;
  int64_t count = PyLong_AsLongLong(args[3]);
  const bool are_vectors = two_vectors(args[1], kInteger, &index, args[2], kFloat, &priority, &count);
  if (PyErr_Occurred()) return nullptr;
  if (!are_vectors) Py_RETURN_NONE;
  int64_t invalid;
  Py_BEGIN_ALLOW_THREADS
  invalid = first_invalid(*tree, index, priority, count);
  if (invalid < 0) kernels->set(*tree, index, priority, count);
  Py_END_ALLOW_THREADS
  return PyLong_FromLongLong(invalid);
}

// update(tree, index, error, count, alpha, epsilon): sets priority <- (|error| + epsilon) ** alpha -> the greatest of
// these priorities; or -1 - the position of the first invalid one, and nothing was set; tensors as in `set`
PyObject* update(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  const Tree* tree = tree_of(args[0]);
  if (!tree) return nullptr;
  int64_t* index;
  float* error;
  int64_t count = PyLong_AsLongLong(args[3]);
  const bool are_vectors = two_vectors(args[1], kInteger, &index, args[2], kFloat, &error, &count);
  const float alpha = static_cast<float>(PyFloat_AsDouble(args[4]));
  const float epsilon = static_cast<float>(PyFloat_AsDouble(args[5]));
  if (PyErr_Occurred()) return nullptr;
  if (!are_vectors) Py_RETURN_NONE;
  constexpr int64_t kOnStack = 1024;
  float on_stack[kOnStack];
  std::unique_ptr<float[]> on_heap(count > kOnStack ? new (std::nothrow) float[static_cast<std::size_t>(count)]
                                                    : nullptr);
  if (count > kOnStack && !on_heap) return PyErr_NoMemory();
  float* priority = on_heap ? on_heap.get() : on_stack;
  int64_t invalid;
  double greatest;
  Py_BEGIN_ALLOW_THREADS
  greatest = kernels->power(error, count, alpha, epsilon, priority);
  invalid = first_invalid(*tree, index, priority, count);
  if (invalid < 0) kernels->set(*tree, index, priority, count);
  Py_END_ALLOW_THREADS
  return PyFloat_FromDouble(invalid < 0 ? greatest : -1.0 - static_cast<double>(invalid));
}

// find(tree, mass, count, index, threads) -> whether all masses were at least 0 and below the total; otherwise `index`
// is left alone; tensors as in `set`
PyObject* find(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 5)) return nullptr;
  const Tree* tree = tree_of(args[0]);
  if (!tree) return nullptr;
  double* mass;
  int64_t* index;
  int64_t count = PyLong_AsLongLong(args[2]);
  const int64_t threads = PyLong_AsLongLong(args[4]);
  const bool are_vectors = two_vectors(args[1], kFloat, &mass, args[3], kInteger, &index, &count);
  if (PyErr_Occurred()) return nullptr;
  if (!are_vectors) Py_RETURN_NONE;
  bool outside = false;
  Py_BEGIN_ALLOW_THREADS
  const double total = tree->total();
  for (int64_t i = 0; i < count; ++i) outside |= !(mass[i] >= 0.0 && mass[i] < total);
  if (!outside) kernels->find(*tree, mass, count, index, threads);
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(!outside);
}

// sample(tree, state, count, beta, index, weight, stratified, threads): draws with probability p / total, and
// weight <- (p / least p) ** -beta. state: two uint64, a key and a counter. -> whether there was anything to draw;
// None for tensors that `two_vectors` refuses or that are not [count]
PyObject* sample(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 8)) return nullptr;
  const Tree* tree = tree_of(args[0]);
  if (!tree) return nullptr;
  uint64_t* state = at<uint64_t>(args[1]);
  const int64_t count = PyLong_AsLongLong(args[2]);
  const float beta = static_cast<float>(PyFloat_AsDouble(args[3]));
  int64_t* index;
  float* weight;
  int64_t given_count = count;
  const bool are_vectors = two_vectors(args[4], kInteger, &index, args[5], kFloat, &weight, &given_count) &&
                           given_count == count;
  const bool stratified = PyObject_IsTrue(args[6]);
  const int64_t threads = PyLong_AsLongLong(args[7]);
  if (PyErr_Occurred()) return nullptr;
  if (!are_vectors) Py_RETURN_NONE;
  bool drawn;
  Py_BEGIN_ALLOW_THREADS
  drawn = kernels->sample(*tree, state, count, beta, index, weight, stratified, threads);
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(drawn);
}

// total(tree) -> the sum of all priorities
PyObject* total(PyObject*, PyObject* capsule) {
  const Tree* tree = tree_of(capsule);
  return tree ? PyFloat_FromDouble(tree->total()) : nullptr;
}

// minimum(tree) -> the least positive priority, inf if there is none
PyObject* minimum(PyObject*, PyObject* capsule) {
  const Tree* tree = tree_of(capsule);
  if (!tree) return nullptr;
  return PyFloat_FromDouble(tree->minimum());
}

// leaves(tree) -> address of the priorities
PyObject* leaves(PyObject*, PyObject* capsule) {
  const Tree* tree = tree_of(capsule);
  return tree ? PyLong_FromSize_t(reinterpret_cast<std::size_t>(tree->raw[0])) : nullptr;
}

// touch(base, order, count) -> the sum of the first numbers of `count` lines of 64 bytes, read in the given order and
// prefetched: it measures the least cost of reading random lines (see bench replay)
PyObject* touch(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 3)) return nullptr;
  const float* base = at<float>(args[0]);
  const int64_t* order = at<int64_t>(args[1]);
  const int64_t count = PyLong_AsLongLong(args[2]);
  if (PyErr_Occurred()) return nullptr;
  constexpr int64_t kLinesAhead = 24;
  float sum = 0.0f;
  Py_BEGIN_ALLOW_THREADS
  for (int64_t i = 0; i < count; ++i) {
    if (i + kLinesAhead < count)
      prefetch(reinterpret_cast<const char*>(base + order[i + kLinesAhead] * kLine), kCacheLine);
    sum += base[order[i] * kLine];
  }
  Py_END_ALLOW_THREADS
  return PyFloat_FromDouble(sum);
}

}  // namespace

#include "gather_module.hpp"
#include "normalize_module.hpp"
#include "topics_module.hpp"
#include "torso_module.hpp"

namespace {

// Chooses the kernels of the instruction set `name`, which must run on this machine.
void use_instruction_set(const char* name) {
  kernels = built_for<Kernels>(name, BUILDS(k));
  topic_kernels = built_for<TopicKernels>(name, BUILDS(kTopics));
  block_kernels = built_for<BlockKernels>(name, BUILDS(kBlocks));
  normalize_kernels = built_for<NormalizeKernels>(name, BUILDS(kNormalize));
}

// simd() -> the instruction set in use; use(name): use another one; ValueError if it does not run on this machine
PyObject* simd(PyObject*, PyObject*) { return PyUnicode_FromString(kernels->name); }

PyObject* use(PyObject*, PyObject* word) {
  PyObject* text = PyUnicode_AsUTF8String(word);
  if (!text) return nullptr;
  const char* name = PyBytes_AsString(text);
  const bool usable = name && runs(name);
  if (usable) use_instruction_set(name);
  Py_DECREF(text);
  if (!usable) return PyErr_Format(PyExc_ValueError, "%R does not run on this machine", word);
  Py_RETURN_NONE;
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL
PyMethodDef methods[] = {
    {"tree_bytes", FAST(tree_bytes), nullptr}, {"tree", FAST(make_tree), nullptr},
    {"set", FAST(set), nullptr},               {"update", FAST(update), nullptr},
    {"find", FAST(find), nullptr},             {"sample", FAST(sample), nullptr},
    {"gather", FAST(gather_rows), nullptr},    {"split", FAST(split_rows), nullptr},
    {"background_thread", make_background_thread, METH_NOARGS, nullptr},
    {"gather_later", FAST(gather_later), nullptr},
    {"split_later", FAST(split_later), nullptr},
    {"await_background_thread", FAST(await_background_thread), nullptr},
    {"touch", FAST(touch), nullptr},           {"expected_topics", FAST(expected_topics), nullptr},
    {"fold_in", FAST(fold_in), nullptr},       {"add_rows", FAST(add_rows), nullptr},
    {"lay_frames", FAST(lay_frames), nullptr}, {"torso", FAST(make_torso), nullptr},
    {"torso_inner", FAST(torso_inner), nullptr},
    {"torso_forward", FAST(torso_forward), nullptr},
    {"torso_backward", FAST(torso_backward), nullptr},
    {"normalize_moments", FAST(normalize_moments), nullptr},
    {"normalize_apply", FAST(normalize_apply), nullptr},
    {"normalize_gradient_sums", FAST(normalize_gradient_sums), nullptr},
    {"normalize_gradient", FAST(normalize_gradient), nullptr},
    {"torso_kernels", torso_names, METH_NOARGS, nullptr},
    {"total", total, METH_O, nullptr},         {"minimum", minimum, METH_O, nullptr},
    {"leaves", leaves, METH_O, nullptr},       {"simd", simd, METH_NOARGS, nullptr},
    {"use", use, METH_O, nullptr},             {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() {
  for (const char* name : {"avx512", "avx2", "portable"}) {
    if (runs(name)) {
      use_instruction_set(name);
      break;
    }
  }
  return PyModule_Create(&module);
}
