// The Python side of the torso's kernels; arguments are addresses and numbers, as module.cpp says, which includes it.
#pragma once

#include "blocks.hpp"
#include "torso.hpp"

#if defined(MURMURATE_TORSO_BF16)
#include <cpuid.h>
#endif
#if defined(MURMURATE_TORSO_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

const BlockKernels* block_kernels = nullptr;

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

#if defined(MURMURATE_TORSO_BF16)
// Whether the processor multiplies bfloat16 in AVX-512; with `amx`, whether it does so in matrix registers too, for
// which a process has to ask the system. If the system refuses, the AVX-512 kernels run.
bool multiplies_bf16(bool amx) {
  unsigned a, b, c, d;
  if (!runs("avx512") || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
  if (!amx) return true;
#if defined(MURMURATE_TORSO_AMX)
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

const TorsoKernels* torso_kernels_named(const char* name) {
#if defined(MURMURATE_TORSO_AMX)
  static const bool amx = multiplies_bf16(true);
  if (amx && !std::strcmp(name, "amx")) return &kTorsoAmx;
#endif
  static const bool avx512_bf16 = multiplies_bf16(false);
  return avx512_bf16 && !std::strcmp(name, "avx512_bf16") ? &kTorsoAvx512Bf16 : nullptr;
}
#else
const TorsoKernels* torso_kernels_named(const char*) { return nullptr; }
#endif

// torso_kernels() -> the names of the torso kernels that run with the instruction set in use, the fastest first
PyObject* torso_names(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (!names || std::strcmp(kernels->name, "avx512")) return names;
  for (const char* name : {"amx", "avx512_bf16"}) {
    if (!torso_kernels_named(name)) continue;
    PyObject* text = PyUnicode_FromString(name);
    const bool failed = !text || PyList_Append(names, text);
    Py_XDECREF(text);
    if (failed) {
      Py_DECREF(names);
      return nullptr;
    }
  }
  return names;
}

struct PlannedTorso {
  const TorsoKernels* kernels;
  Torso torso;
};

const char* kTorso = "murmurate.torso";

PlannedTorso* torso_of(PyObject* capsule) { return static_cast<PlannedTorso*>(PyCapsule_GetPointer(capsule, kTorso)); }

void free_torso(PyObject* capsule) { delete torso_of(capsule); }

// Reads the addresses in a tuple; false, with an error set, if there are not `wanted` of them.
template <typename T>
bool addresses(PyObject* tuple, Py_ssize_t wanted, T** to) {
  if (PyTuple_Size(tuple) != wanted) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "%zd addresses are wanted", wanted);
    return false;
  }
  for (Py_ssize_t i = 0; i < wanted; ++i) to[i] = at<T>(PyTuple_GetItem(tuple, i));
  return !PyErr_Occurred();
}

// torso(kernels, layers, features) -> capsule, or None if those kernels do not run, there are no layers or too many, or
// `fits` is false; layers are tuples (height, width, channels, kernel, filters, block) as in torso.hpp
PyObject* make_torso(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 3)) return nullptr;
  const char* name = PyUnicode_AsUTF8AndSize(args[0], nullptr);
  if (!name) return nullptr;
  const Py_ssize_t layers = PyTuple_Size(args[1]);
  if (PyErr_Occurred()) return nullptr;
  std::unique_ptr<PlannedTorso> planned(new (std::nothrow) PlannedTorso);
  if (!planned) return PyErr_NoMemory();
  planned->kernels = torso_kernels_named(name);
  if (!planned->kernels || layers < 1 || layers > Torso::kMost) Py_RETURN_NONE;
  planned->torso.layers = layers;
  planned->torso.features = PyLong_AsLongLong(args[2]);
  if (PyErr_Occurred()) return nullptr;
  for (Py_ssize_t i = 0; i < layers; ++i) {
    Layer& l = planned->torso.layer[i];
    if (!PyArg_ParseTuple(PyTuple_GetItem(args[1], i), "LLLLLL", &l.height, &l.width, &l.channels, &l.kernel,
                          &l.filters, &l.block))
      return nullptr;
  }
  if (!planned->kernels->fits(planned->torso)) Py_RETURN_NONE;
  PyObject* capsule = PyCapsule_New(planned.get(), kTorso, free_torso);
  if (capsule) planned.release();
  return capsule;
}

// torso_inner(torso, batch) -> numbers that torso_forward keeps for torso_backward
PyObject* torso_inner(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 2)) return nullptr;
  const PlannedTorso* planned = torso_of(args[0]);
  if (!planned) return nullptr;
  const int64_t batch = PyLong_AsLongLong(args[1]);
  if (PyErr_Occurred()) return nullptr;
  return PyLong_FromLongLong(planned->kernels->inner(planned->torso, batch));
}

// torso_forward(torso, batch, laid, parameters, inner, features)
PyObject* torso_forward(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 6)) return nullptr;
  const PlannedTorso* planned = torso_of(args[0]);
  if (!planned) return nullptr;
  const int64_t batch = PyLong_AsLongLong(args[1]);
  const Bf16* laid = at<Bf16>(args[2]);
  const Bf16* parameters[2 * Torso::kMost + 2];
  if (!addresses(args[3], 2 * planned->torso.layers + 2, parameters)) return nullptr;
  Bf16 *inner = at<Bf16>(args[4]), *features = at<Bf16>(args[5]);
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS
  done = planned->kernels->forward(planned->torso, batch, laid, parameters, inner, features);
  Py_END_ALLOW_THREADS
  if (!done) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// torso_backward(torso, batch, laid, inner, features, gradient, parameters, gradients, first): see torso.hpp
PyObject* torso_backward(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!expect(n, 9)) return nullptr;
  const PlannedTorso* planned = torso_of(args[0]);
  if (!planned) return nullptr;
  const int64_t batch = PyLong_AsLongLong(args[1]);
  const Bf16 *laid = at<Bf16>(args[2]), *inner = at<Bf16>(args[3]), *features = at<Bf16>(args[4]);
  const Bf16* gradient = at<Bf16>(args[5]);
  const Bf16* parameters[2 * Torso::kMost + 2];
  Bf16* gradients[2 * Torso::kMost + 2];
  if (!addresses(args[6], 2 * planned->torso.layers + 2, parameters)) return nullptr;
  if (!addresses(args[7], 2 * planned->torso.layers + 2, gradients)) return nullptr;
  const int64_t first = PyLong_AsLongLong(args[8]);
  if (PyErr_Occurred()) return nullptr;
  bool done;
  Py_BEGIN_ALLOW_THREADS
  done = planned->kernels->backward(planned->torso, batch, laid, inner, features, gradient, parameters, gradients,
                                 first);
  Py_END_ALLOW_THREADS
  if (!done) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

}  // namespace
