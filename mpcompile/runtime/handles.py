"""Tensors as the C handles that compiled code reads: data pointers without a Python call each.

Private torch API, seen in 2.11 to 2.14: ``torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors``, and
``c10::TensorImpl::mutable_grad`` and ``torch::autograd::impl::bump_version`` by their mangled
names, which spare Python from looking at every parameter; where they are not exported, it does. The
functions that read a handle (``aoti_torch_get_data_ptr`` and so on) are AOTInductor's stable C
interface. Reading 8,000 pointers this way costs 0.1 ms; ``Tensor.data_ptr`` costs ten times that.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from mpcompile.codegen.build import build_library
from mpcompile.errors import CodegenError

READERS = (
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dtype",
    "aoti_torch_get_dim",
    "aoti_torch_get_numel",
    "aoti_torch_get_strides",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_is_defined",
)
OF_PARAMETERS = (
    "_ZN3c1010TensorImpl12mutable_gradEv",
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
)

FUNCTIONS = ("list_is", "dict_is", "dicts_are", "locate", "locate_once")
SOURCE = """\
// Refresh a tensor table: do the objects still hold, where does each tensor lie?
#include <cstdint>

extern "C" {
int PyDict_Next(void*, intptr_t*, void**, void**);
intptr_t PyList_Size(void*);
void* PyList_GetItem(void*, intptr_t);
void* PyCapsule_GetPointer(void*, const char*);

struct Readers {
  int32_t (*data_ptr)(void*, void**);
  int32_t (*dtype)(void*, int32_t*);
  int32_t (*dim)(void*, int64_t*);
  int32_t (*numel)(void*, int64_t*);
  int32_t (*strides)(void*, int64_t**);
  int32_t (*remove)(void*);
  int32_t (*is_defined)(void*, bool*);
  void* (*grad)(void*);  // of an implementation; this and the next may be null
  void (*bump)(void*);
};

// What a tensor looked like when the table was made; strides of dimensions follow one another.
struct Layout { int64_t dtype, dim, numel, first_stride; };

// Ask ahead for an implementation and for what its words point to (2 is its storage, 3 what
// autograd knows, 5 its version): each is a cache miss. That they are addresses only saves time.
static void ask_for(const void* implementation) {
  for (int64_t byte = 0; byte < 256; byte += 64)
    __builtin_prefetch((const char*)implementation + byte);
}

static void ask_for_word(const void* implementation, int word) {
  const char* address = ((const char* const*)implementation)[word];
  __builtin_prefetch(address), __builtin_prefetch(address + 64);
}

int64_t list_is(void* list, void* const* items, int64_t count) {
  if (PyList_Size(list) != count) return 0;
  for (int64_t i = 0; i < count; i++) if (PyList_GetItem(list, i) != items[i]) return 0;
  return 1;
}

int64_t dict_is(void* dict, void* const* items, int64_t count) {
  intptr_t at = 0;
  void *key, *value;
  int64_t n = 0;
  for (; PyDict_Next(dict, &at, &key, &value); n++)
    if (n >= count || items[2 * n] != key || (items[2 * n + 1] && items[2 * n + 1] != value))
      return 0;
  return n == count;
}

// items: for each dict of the list, `widths` pairs of key and value; a null value may be anything.
int64_t dicts_are(void* list, const int64_t* widths, void* const* items) {
  const int64_t count = PyList_Size(list);
  for (int64_t i = 0; i < count; i++) {
    if (i + 32 < count) __builtin_prefetch(PyList_GetItem(list, i + 32));
    if (i + 16 < count) ask_for(((void**)PyList_GetItem(list, i + 16))[4]);  // keys, as a rule
    if (!dict_is(PyList_GetItem(list, i), items, widths[i])) return 0;
    items += 2 * widths[i];
  }
  return 1;
}

static bool looks(const Readers& read, void* tensor, const Layout& want, const int64_t* strides) {
  int32_t dtype;
  int64_t dim, numel, *stride;
  if (read.dtype(tensor, &dtype) || read.dim(tensor, &dim)) return false;
  if (read.numel(tensor, &numel)) return false;
  if (dtype != want.dtype || dim != want.dim || numel != want.numel) return false;
  if (read.strides(tensor, &stride)) return false;
  for (int64_t d = 0; d < dim; d++) if (stride[d] != strides[want.first_stride + d]) return false;
  return true;
}

static void ask_ahead(void* const* tensors, int64_t i, int64_t count, int word) {
  if (i + 64 < count) ask_for(tensors[i + 64]);
  if (i + 32 < count) ask_for_word(tensors[i + 32], word);
}

// A list of tensors, what they looked like, and where their pointers go.
// `tensors` are their implementations: a handle is the address of such an address.
struct Tensors {
  int64_t count;
  void* const* tensors;
  const Layout* layouts;
  const int64_t* strides;
  const int64_t* places;
};

// Shared among the threads of a team, as the next one is. Returns how many tensors look different.
static int64_t locate_fixed(const Readers& read, const Tensors& t, void** pointers,
                            int64_t& elsewhere) {
  int64_t changed = 0;
  #pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < t.count; i++) {
    ask_ahead(t.tensors, i, t.count, 2);
    void *handle = (void*)&t.tensors[i], *data = nullptr;
    changed += read.data_ptr(handle, &data) != 0;
    elsewhere += pointers[t.places[i]] != data;
    pointers[t.places[i]] = data;
    changed += !looks(read, handle, t.layouts[i], t.strides);
  }
  return changed;
}

// The gradients of parameters, which count as changed. Those at the end, of which nothing else is
// known, should have none.
static int64_t locate_grads(const Readers& read, const Tensors& t, int64_t without,
                            void** pointers, void** again) {
  static constexpr int64_t AHEAD = 16;
  const int64_t all = t.count + without;
  int64_t changed = 0;
  void* found[AHEAD];
  #pragma omp for schedule(static) nowait
  for (int64_t block = 0; block < all; block += AHEAD) {
    const int64_t end = block + AHEAD < all ? block + AHEAD : all;
    for (int64_t i = block; i < end; i++) {
      ask_ahead(t.tensors, i, all, 3);
      if (i + 32 < t.count) ask_for_word(t.tensors[i + 32], 5);
      found[i - block] = read.grad(t.tensors[i]);
      ask_for(*(void**)found[i - block]);
    }
    for (int64_t i = block; i < end; i++) ask_for_word(*(void**)found[i - block], 2);
    for (int64_t i = block; i < end; i++) {
      void *grad = found[i - block], *data = nullptr;
      bool there = false;
      if (i < t.count) read.bump((void*)&t.tensors[i]);
      read.is_defined(grad, &there);
      if (there && i < t.count && looks(read, grad, t.layouts[i], t.strides)) {
        changed += read.data_ptr(grad, &data) != 0;
        pointers[t.places[i]] = again[i] = data;
      } else {
        changed += there || i < t.count;
      }
    }
  }
  return changed;
}

// Returns how many tensors look different; *moved counts pointers that changed. The gradients of
// `owners` are located too, unless it is null.
int64_t locate(const Readers* read, const Tensors* fixed, const Tensors* owners, int64_t without,
               void** pointers, void** again, int64_t* moved, int64_t threads) {
  int64_t changed = 0, elsewhere = 0;
  #pragma omp parallel num_threads(int(threads)) reduction(+ : changed, elsewhere)
  {
    changed += locate_fixed(*read, *fixed, pointers, elsewhere);
    if (owners) changed += locate_grads(*read, *owners, without, pointers, again);
  }
  *moved = elsewhere;
  return changed;
}

// The same for a list of capsules, which are used up.
int64_t locate_once(const Readers* read, void* capsules, const Layout* layouts,
                    const int64_t* strides, const int64_t* places, void** pointers, void** again) {
  int64_t changed = 0;
  const int64_t count = PyList_Size(capsules);
  for (int64_t i = 0; i < count; i++) {
    void* tensor = PyCapsule_GetPointer(PyList_GetItem(capsules, i), nullptr);
    void* data = nullptr;
    changed += read->data_ptr(tensor, &data) != 0;
    pointers[places[i]] = again[i] = data;
    changed += !looks(*read, tensor, layouts[i], strides);
    read->remove(tensor);
  }
  return changed;
}
}
"""


@functools.cache
def _torch_library() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    for path in (*folder.glob("libtorch_cpu.*"), *folder.glob("torch_cpu.dll")):
        return ctypes.CDLL(str(path))
    raise CodegenError(
        f"fuse-updates: {folder} holds no libtorch_cpu; torch is built in another way."
    )


@functools.cache
def readers() -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of the functions that read a handle, as ``Readers`` lists them."""
    library = _torch_library()
    missing = [name for name in READERS if not hasattr(library, name)]
    if missing:
        raise CodegenError(f"fuse-updates: torch {torch.__version__} lacks {', '.join(missing)}.")
    functions = [getattr(library, name) for name in READERS]
    functions += [getattr(library, n) if can_read_grads() else None for n in OF_PARAMETERS]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    return (ctypes.c_void_p * len(addresses))(*addresses)


@functools.cache
def can_read_grads() -> bool:
    """Whether gradients can be found, and changes be noted, by their parameters' handles."""
    return all(hasattr(_torch_library(), name) for name in OF_PARAMETERS)


@functools.cache
def native(cache_dir: Path | None) -> ctypes.PyDLL:
    """Return the table's native part, built once; its functions run under the GIL."""
    library = ctypes.PyDLL(str(build_library(SOURCE, cache_dir).path))
    for name in FUNCTIONS:
        getattr(library, name).restype = ctypes.c_int64
    obj, ptr, i64 = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64
    library.list_is.argtypes = [obj, ptr, i64]
    library.dict_is.argtypes = [obj, ptr, i64]
    library.dicts_are.argtypes = [obj, ptr, ptr]
    library.locate.argtypes = [ptr, ptr, ptr, i64, ptr, ptr, ptr, i64]
    library.locate_once.argtypes = [ptr, obj, ptr, ptr, ptr, ptr, ptr]
    return library


def open_capsules(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return a new handle of each tensor, in a capsule; ``locate_once`` frees them."""
    capsules: list[Any] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return capsules


class Handles:
    """Handles that live as long as this object; each keeps its tensor alive.

    ``array`` holds their only word, the address of the implementation: they lie side by side there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        capsules = open_capsules(self.tensors)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self._handles = [get(capsule, None) for capsule in capsules]
        words = (ctypes.c_void_p.from_address(handle).value for handle in self._handles)
        self.array = (ctypes.c_void_p * len(capsules))(*words)
        self._remove = _torch_library().aoti_torch_delete_tensor_object
        self._remove.argtypes = [ctypes.c_void_p]

    def __del__(self) -> None:
        """Free the handles, with what is at hand: globals may be gone when Python exits."""
        for handle in self._handles:
            self._remove(handle)


class Layouts:
    """How a list of tensors looked: dtype code, dimensions, elements, strides."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        codes: dict[torch.dtype, int] = {}
        layouts: list[int] = []
        strides: list[int] = []
        for tensor in tensors:
            if tensor.dtype not in codes:
                codes[tensor.dtype] = _dtype_code(tensor)
            layouts += (codes[tensor.dtype], tensor.dim(), tensor.numel(), len(strides))
            strides += tensor.stride()
        self.layouts = (ctypes.c_int64 * len(layouts))(*layouts)
        self.strides = (ctypes.c_int64 * max(len(strides), 1))(*strides)


class TensorList(ctypes.Structure):
    """``Tensors`` of the native part; what is passed in has to live as long."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tensors", "layouts", "strides", "places")),
    ]

    def __init__(self, count: int, handles: Handles, layouts: Layouts, places: int) -> None:
        arrays = (handles.array, layouts.layouts, layouts.strides)
        super().__init__(count, *(ctypes.addressof(item) for item in arrays), places)


def _dtype_code(tensor: torch.Tensor) -> int:
    """Return the number that C handles use for the dtype of ``tensor``."""
    handles, code = Handles([tensor]), ctypes.c_int32()
    _torch_library().aoti_torch_get_dtype(ctypes.byref(handles.array), ctypes.byref(code))
    return code.value
