// The Python side of the torso's kernels (see module.cpp, which includes this): addresses and numbers.
#pragma once

#include "blocks.hpp"
#include "torso.hpp"

#if defined(MURMURATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

const BlockKernels* block_kernels = nullptr;

const BlockKernels* block_kernels_named(const char* name) {
#if defined(MURMURATE_X86)
  if (!std::strcmp(name, "avx512")) return &kBlocksAvx512;
  if (!std::strcmp(name, "avx2")) return &kBlocksAvx2;
#endif
  return std::strcmp(name, "portable") ? nullptr : &kBlocksPortable;
}

// lay_frames(pixels, stride, shape, batch, bits, out): shape is (channels, height, width); bits are 16 for bfloat16
// or 32 for float32
PyObject* lay_frames(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  Frames frames = {at<uint8_t>(args[0]), PyLong_AsLongLong(args[1]), PyLong_AsLongLong(args[3]), 0, 0, 0};
  if (!PyArg_ParseTuple(args[2], "LLL", &frames.channels, &frames.height, &frames.width)) return nullptr;
  const int64_t bits = PyLong_AsLongLong(args[4]);
  void* out = at<void>(args[5]);
  if (PyErr_Occurred()) return nullptr;
  if (frames.channels < 1 || frames.channels > kMostChannels)
    return PyErr_Format(PyExc_ValueError, "frames have 1 to %lld channels", static_cast<long long>(kMostChannels));
  Py_BEGIN_ALLOW_THREADS
  if (bits == 16)
    block_kernels->bfloat16(frames, static_cast<uint16_t*>(out));
  else
    block_kernels->float32(frames, static_cast<float*>(out));
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

#if defined(MURMURATE_AMX)
// Whether the processor has AMX for bfloat16, and the system saves its registers for this process, which has to be
// asked for once. Where it is refused nothing is lost: torch runs.
bool may_use_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;  // AVX512_BF16
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return runs("avx512") && syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}
#endif

bool amx() {
#if defined(MURMURATE_AMX)
  static const bool may = may_use_amx();
  return may && !std::strcmp(kernels->name, "avx512");
#else
  return false;
#endif
}

// has_amx() -> whether torso_forward and torso_backward run here, with the instruction set in use
PyObject* has_amx(PyObject*, PyObject*) { return PyBool_FromLong(amx()); }

#if defined(MURMURATE_AMX)
const char* kTorso = "murmurate.torso";

Torso* torso_of(PyObject* capsule) { return static_cast<Torso*>(PyCapsule_GetPointer(capsule, kTorso)); }

void forget_torso(PyObject* capsule) { delete torso_of(capsule); }

// The addresses in a tuple; false, with an error set, if there are not as many as wanted.
template <typename T>
bool addresses(PyObject* tuple, Py_ssize_t wanted, T** to) {
  if (PyTuple_Size(tuple) != wanted) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%zd addresses are wanted", wanted);
    return false;
  }
  for (Py_ssize_t i = 0; i < wanted; ++i) to[i] = at<T>(PyTuple_GetItem(tuple, i));
  return !PyErr_Occurred();
}

// torso(layers, features) -> capsule, or None where there are no registers or they do not fit; layers are tuples
// (height, width, channels, kernel, filters, block) as in torso.hpp
PyObject* make_torso(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 2)) return nullptr;
  const Py_ssize_t layers = PyTuple_Size(args[0]);
  if (PyErr_Occurred()) return nullptr;
  if (!amx() || layers < 1 || layers > Torso::kMost) Py_RETURN_NONE;
  std::unique_ptr<Torso> torso(new (std::nothrow) Torso);
  if (!torso) return PyErr_NoMemory();
  torso->layers = layers;
  torso->features = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    Layer& l = torso->layer[i];
    if (!PyArg_ParseTuple(PyTuple_GetItem(args[0], i), "LLLLLL", &l.height, &l.width, &l.channels, &l.kernel,
                          &l.filters, &l.block))
      return nullptr;
  }
  if (!torso_fits(*torso)) Py_RETURN_NONE;
  PyObject* capsule = PyCapsule_New(torso.get(), kTorso, forget_torso);
  if (capsule) torso.release();
  return capsule;
}

// torso_inner(torso, batch) -> numbers that torso_forward keeps for torso_backward
PyObject* inner_size(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 2)) return nullptr;
  const Torso* torso = torso_of(args[0]);
  if (!torso) return nullptr;
  const int64_t batch = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(torso_inner(*torso, batch));
}

// torso_forward(torso, batch, laid, parameters, inner, features)
PyObject* forward_torso(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  const Torso* torso = torso_of(args[0]);
  if (!torso) return nullptr;
  const int64_t batch = PyLong_AsLongLong(args[1]);
  const Brain* laid = at<Brain>(args[2]);
  const Brain* parameters[2 * Torso::kMost + 2];
  if (!addresses(args[3], 2 * torso->layers + 2, parameters)) return nullptr;
  Brain *inner = at<Brain>(args[4]), *features = at<Brain>(args[5]);
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS
  done = torso_forward(*torso, batch, laid, parameters, inner, features);
  Py_END_ALLOW_THREADS
  if (!done) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// torso_backward(torso, batch, laid, inner, features, gradient, parameters, gradients)
PyObject* backward_torso(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 8)) return nullptr;
  const Torso* torso = torso_of(args[0]);
  if (!torso) return nullptr;
  const int64_t batch = PyLong_AsLongLong(args[1]);
  const Brain *laid = at<Brain>(args[2]), *inner = at<Brain>(args[3]), *features = at<Brain>(args[4]);
  const Brain* gradient = at<Brain>(args[5]);
  const Brain* parameters[2 * Torso::kMost + 2];
  Brain* gradients[2 * Torso::kMost + 2];
  if (!addresses(args[6], 2 * torso->layers + 2, parameters)) return nullptr;
  if (!addresses(args[7], 2 * torso->layers + 2, gradients)) return nullptr;
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS
  done = torso_backward(*torso, batch, laid, inner, features, gradient, parameters, gradients);
  Py_END_ALLOW_THREADS
  if (!done) return PyErr_NoMemory();
  Py_RETURN_NONE;
}
#else
// Nobody calls these where has_amx() is false.
PyObject* no_torso(PyObject*, PyObject* const*, Py_ssize_t) {
  PyErr_SetString(PyExc_RuntimeError, "the torso's kernels were not built: has_amx() says so");
  return nullptr;
}
PyObject* make_torso(PyObject* m, PyObject* const* a, Py_ssize_t n) { return no_torso(m, a, n); }
PyObject* inner_size(PyObject* m, PyObject* const* a, Py_ssize_t n) { return no_torso(m, a, n); }
PyObject* forward_torso(PyObject* m, PyObject* const* a, Py_ssize_t n) { return no_torso(m, a, n); }
PyObject* backward_torso(PyObject* m, PyObject* const* a, Py_ssize_t n) { return no_torso(m, a, n); }
#endif

}  // namespace
