/* The bytes of a connection to PostgreSQL, divided into messages.

   A message is a letter, its length, its content (manual, "Message Formats"). Nothing is read outside the given buffers,
   whatever they hold. The interpreter's lock is not held while bytes are read. */

#include "../../../compiled_arrays.h"

PyDoc_STRVAR(find_frames_doc,
"find_frames(data, at, filled, longest, letter) -> bytes\n\n"
"Return where the whole frames of `data` from `at` to `filled` begin, and where the last one ends (int64).\n"
"A frame whose length is more than `longest` is taken for the end, and one of another `letter`\n"
"or without a length; -1: any frame.");

static uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static PyObject *find_frames(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "find_frames takes 5 arguments");
    int64_t at = PyLong_AsLongLong(args[1]), filled = PyLong_AsLongLong(args[2]), longest = PyLong_AsLongLong(args[3]);
    int64_t letter = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    PyObject *result = NULL;
    int64_t *bounds = NULL, found = 0, room = 0;
    if (at < 0 || at > filled || filled > view.len) {
        PyErr_SetString(PyExc_ValueError, "the frames are not within the data");
        goto end;
    }
    int is_full = 0;
    Py_BEGIN_ALLOW_THREADS
    const uint8_t *data = view.buf;
    for (;;) {
        if (found == room) {
            room = room ? 2 * room : 1024;
            int64_t *more = realloc(bounds, (size_t)room * sizeof *bounds);
            if ((is_full = more == NULL)) break;
            bounds = more;
        }
        bounds[found++] = at;
        if (filled - at < 5 || (letter >= 0 && data[at] != letter)) break;
        int64_t length = big_endian(data + at + 1);
        if (length > longest || length + 1 > filled - at || (letter >= 0 && length < 4)) break;
        at += length + 1;
    }
    Py_END_ALLOW_THREADS
    result = is_full ? PyErr_NoMemory() : PyBytes_FromStringAndSize((char *)bounds, (Py_ssize_t)(found * (int64_t)sizeof *bounds));
end:
    free(bounds);
    PyBuffer_Release(&view);
    return result;
}

PyDoc_STRVAR(join_doc,
"join(data, starts, ends) -> bytes\n\n"
"Return the bytes of `data` between each of `starts` and its end (int64), one after the other.");

static PyObject *join(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static const size_t sizes[3] = {1, 8, 8};
    if (count != 3) return PyErr_Format(PyExc_TypeError, "join takes 3 arguments");
    Argument of[3] = {0};
    PyObject *result = NULL;
    if (open_all(of, args, sizes, 3) < 0) goto end;
    const int64_t *starts = of[1].view.buf, *ends = of[2].view.buf;
    int64_t pieces = items(of + 1, 8), total = 0;
    int is_whole = items(of + 2, 8) == pieces;
    for (int64_t i = 0; is_whole && i < pieces; i++) {
        is_whole = starts[i] >= 0 && starts[i] <= ends[i] && ends[i] <= of[0].view.len &&
                   total <= PY_SSIZE_T_MAX - (ends[i] - starts[i]);
        if (is_whole) total += ends[i] - starts[i];
    }
    if (!is_whole) {
        PyErr_SetString(PyExc_ValueError, "the pieces are not within the data");
        goto end;
    }
    if ((result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total)) == NULL) goto end;
    char *to = PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    const char *data = of[0].view.buf;
    for (int64_t i = 0; i < pieces; i++) {
        size_t size = (size_t)(ends[i] - starts[i]);
        memcpy(to, data + starts[i], size);
        to += size;
    }
    Py_END_ALLOW_THREADS
end:
    close_all(of, 3);
    return result;
}

static PyMethodDef methods[] = {
    {"find_frames", (PyCFunction)(void (*)(void))find_frames, METH_FASTCALL, find_frames_doc},
    {"join", (PyCFunction)(void (*)(void))join, METH_FASTCALL, join_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_frames", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_frames(void) { return PyModule_Create(&module); }
