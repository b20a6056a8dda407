/* What the compiled modules share: arrays as arguments and as results, and the bytes that JSON escapes. */

#ifndef COMPILED_ARRAYS_H
#define COMPILED_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* ---- the arguments ---- */

typedef struct {
    Py_buffer view;
    int is_open;
} Argument;

static void close_all(Argument *arguments, int count) {
    for (int i = 0; i < count; i++)
        if (arguments[i].is_open) PyBuffer_Release(&arguments[i].view);
}

/* Open `count` arguments; `sizes` is the size of an item of each, which tells its number of items. */
static int open_all(Argument *arguments, PyObject *const *objects, const size_t *sizes, int count) {
    for (int i = 0; i < count; i++) {
        if (PyObject_GetBuffer(objects[i], &arguments[i].view, PyBUF_SIMPLE) < 0) return -1;
        arguments[i].is_open = 1;
        if (arguments[i].view.len % (Py_ssize_t)sizes[i] ||
            (uintptr_t)arguments[i].view.buf % sizes[i]) {
            PyErr_Format(PyExc_ValueError, "argument %d is no array of items of %zu bytes", i, sizes[i]);
            return -1;
        }
    }
    return 0;
}

/* Whether an argument is a tuple of two, as texts and where they begin are. */
static inline int is_pair(PyObject *given) { return PyTuple_Check(given) && PyTuple_Size(given) == 2; }

static int64_t items(const Argument *argument, size_t size) { return argument->view.len / (Py_ssize_t)size; }

/* Whether `bytes` bytes have `count` bits from number `first` on. None of these is negative. */
static inline int has_bits(int64_t bytes, int64_t first, int64_t count) {
    return first <= INT64_MAX - 7 - count && (first + count + 7) / 8 <= bytes;
}

/* ---- the results ---- */

static void free_block(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, NULL)); }

/* Return (owner, address, size) of a block that Python owns from now on. */
static PyObject *owned(void **block, size_t size) {
    if (*block == NULL && (*block = malloc(1)) == NULL) return PyErr_NoMemory();
    PyObject *owner = PyCapsule_New(*block, NULL, free_block);
    if (owner == NULL) return NULL;
    void *address = *block;
    *block = NULL;
    return Py_BuildValue("(NKn)", owner, (unsigned long long)(uintptr_t)address, (Py_ssize_t)size);
}

/* ---- JSON ---- */

static inline int is_special(uint8_t byte) { return byte < 0x20 || byte == '"' || byte == '\\'; }

/* Whether one of eight bytes is special (exact: "haszero" of Anderson's Bit Twiddling Hacks). */
static inline int has_special(uint64_t word) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u;
    uint64_t quote = word ^ (ones * '"'), backslash = word ^ (ones * '\\');
    uint64_t found = ((word - ones * 0x20) & ~word) | ((quote - ones) & ~quote) | ((backslash - ones) & ~backslash);
    return (found & tops) != 0;
}

#ifdef __SSE2__
/* Copy 16 bytes to `to`, if it is not NULL, and return how many of them come before the first special one. */
static inline int plain_of_sixteen(const uint8_t *from, uint8_t *to) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)from), last_control = _mm_set1_epi8(0x1f);
    if (to != NULL) _mm_storeu_si128((__m128i *)to, bytes);
    __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(bytes, last_control), bytes);
    __m128i quote = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')), backslash = _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'));
    int special = _mm_movemask_epi8(_mm_or_si128(control, _mm_or_si128(quote, backslash)));
    return special ? __builtin_ctz((unsigned)special) : 16;
}
#endif

/* Return the first special byte from `at` on, or `stop`. */
static inline const uint8_t *past_plain(const uint8_t *at, const uint8_t *stop) {
#ifdef __SSE2__
    while (stop - at >= 16) {
        int plain = plain_of_sixteen(at, NULL);
        at += plain;
        if (plain < 16) return at;
    }
#endif
    while (stop - at >= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        if (has_special(word)) break;
        at += 8;
    }
    while (at < stop && !is_special(*at)) at++;
    return at;
}

#endif
