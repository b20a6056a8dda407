/* The bytes of a connection to PostgreSQL: receiving many at a time, and dividing them into messages.

   A message is a letter, its length, its content (manual, "Message Formats"). Nothing is read outside the given buffers,
   whatever they hold. The interpreter's lock is not held while bytes are received or read. */

#define _GNU_SOURCE /* ppoll */
#include "../../../compiled_arrays.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

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

PyDoc_STRVAR(receive_doc,
"receive(descriptor, into, enough, gap_micros, idle_micros, most_micros) -> int | None\n\n"
"Receive from a socket what has arrived, and what arrives next: until there are `enough` bytes, `into` is full,\n"
"nothing has come for `idle_micros`, or `most_micros` have passed. When all that was there is taken, it sleeps for\n"
"`gap_micros` first: to wake up for every few bytes costs both sides more. Return the number of bytes, 0 at the end of\n"
"the stream; None if nothing has arrived, without waiting. Raises `OSError`. After an error that follows some bytes,\n"
"which are returned, the next call may meet the end of the stream.");

static int64_t micros_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

static struct timespec timespec_of(int64_t micros) {
    struct timespec found = {(time_t)(micros / 1000000), (long)(micros % 1000000 * 1000)};
    return found;
}

/* Whether something arrives within so many microseconds. */
static int is_readable(int descriptor, int64_t micros) {
    struct pollfd socket = {descriptor, POLLIN, 0};
#ifdef __linux__
    struct timespec wait = timespec_of(micros);
    return ppoll(&socket, 1, &wait, NULL) > 0;
#else
    return poll(&socket, 1, (int)((micros + 999) / 1000)) > 0;
#endif
}

static PyObject *receive(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 6) return PyErr_Format(PyExc_TypeError, "receive takes 6 arguments");
    int descriptor = (int)PyLong_AsLong(args[0]);
    int64_t enough = PyLong_AsLongLong(args[2]), gap = PyLong_AsLongLong(args[3]);
    int64_t idle = PyLong_AsLongLong(args[4]), most = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[1], &view, PyBUF_WRITABLE) < 0) return NULL;
    int64_t taken = 0;
    int problem = 0, is_over = 0, has_slept = 0;
    Py_BEGIN_ALLOW_THREADS
    int64_t until = 0;
    if (enough > view.len) enough = view.len;
    do {
        ssize_t more = recv(descriptor, (char *)view.buf + taken, (size_t)(view.len - taken), MSG_DONTWAIT);
        if (more > 0) {
            taken += more;
            has_slept = 0;
            continue;
        }
        is_over = more == 0;
        if (more < 0 && errno == EINTR) continue;
        if (is_over || (errno != EAGAIN && errno != EWOULDBLOCK)) {
            problem = is_over ? 0 : errno;
            break;
        }
        if (!taken) break;
        int64_t now = micros_now(), left;
        if (!until) until = now + most;
        left = until - now < idle ? until - now : idle;
        if (left <= 0) break;
        if (!has_slept && gap < left) {
            struct timespec wait = timespec_of(gap);
            nanosleep(&wait, NULL);
            has_slept = 1;
        } else if (!is_readable(descriptor, left))
            break;
    } while (taken < enough);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (problem && !taken) {
        errno = problem;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!taken && !is_over) return Py_NewRef(Py_None);
    return PyLong_FromLongLong(taken);
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
    {"receive", (PyCFunction)(void (*)(void))receive, METH_FASTCALL, receive_doc},
    {"find_frames", (PyCFunction)(void (*)(void))find_frames, METH_FASTCALL, find_frames_doc},
    {"join", (PyCFunction)(void (*)(void))join, METH_FASTCALL, join_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_socket", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_socket(void) { return PyModule_Create(&module); }
