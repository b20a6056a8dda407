/* A thread that receives from a socket ahead of whoever takes what has arrived, into a ring.

   While the taker works, the server need not wait for it: a Unix socket holds what a busy server sends in less than a
   millisecond. The thread never needs the interpreter. The two wake each other by pipes. */

#define _GNU_SOURCE /* ppoll */
#include "../../../compiled_arrays.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int descriptor, to_thread[2], to_taker[2];
    pid_t process;
    pthread_t thread;
    pthread_mutex_t lock;
    uint8_t *ring;
    size_t room;
    int is_started, is_taking;
    /* Under the lock: where the first byte not taken lies, how many there are, and how many the taker sleeps for. */
    size_t begin, filled, wanted;
    int is_full, is_over, is_stopped, problem;
} Receiver;

static const char *const RECEIVER = "omnisupport_ingest.receiver";
/* How long the thread lets more arrive once it has taken all: to wake up for every few bytes costs both sides more. A
   server that sends a message for each row is stopped by a full socket after some 600 µs. One that sends faster than
   MANY_BYTES in this time is waited for without a gap. */
static const int64_t GAP_MICROS = 250;
static const size_t MANY_BYTES = 32 * 1024;
static const int64_t LONGEST_MICROS = (int64_t)1 << 40;

static int64_t micros_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

/* Wake whoever sleeps on the other end. A pipe that is full wakes it too. */
static void wake(const int pipe_[2]) {
    while (write(pipe_[1], "", 1) < 0 && errno == EINTR) continue;
}

/* Sleep until woken, or until `descriptor` is readable (-1: none), or for so many microseconds (-1: no end). */
static void sleep_until_woken(const int pipe_[2], int descriptor, int64_t micros) {
    struct pollfd both[2] = {{pipe_[0], POLLIN, 0}, {descriptor, POLLIN, 0}};
#ifdef __linux__
    struct timespec wait = {(time_t)(micros / 1000000), (long)(micros % 1000000 * 1000)};
    ppoll(both, 2, micros < 0 ? NULL : &wait, NULL);
#else
    poll(both, 2, micros < 0 ? -1 : (int)((micros + 999) / 1000));
#endif
    char read_away[64];
    while (read(pipe_[0], read_away, sizeof read_away) > 0) continue;
}

static void *receive_ahead(void *given) {
    Receiver *of = given;
#ifdef __linux__
    /* Shown by ps and top. */
    prctl(PR_SET_NAME, "receives ahead");
#endif
    int has_slept = 0;
    size_t since_slept = 0;
    for (;;) {
        pthread_mutex_lock(&of->lock);
        size_t at = (of->begin + of->filled) % of->room, span = of->room - of->filled;
        int is_stopped = of->is_stopped;
        of->is_full = !span;
        pthread_mutex_unlock(&of->lock);
        if (is_stopped) return NULL;
        if (!span) {
            sleep_until_woken(of->to_thread, -1, -1);
            continue;
        }
        if (span > of->room - at) span = of->room - at;
        ssize_t more = recv(of->descriptor, of->ring + at, span, MSG_DONTWAIT);
        int problem = more < 0 ? errno : 0;
        if (problem == EINTR) continue;
        if (problem == EAGAIN || problem == EWOULDBLOCK) {
            struct timespec gap = {0, (long)(GAP_MICROS * 1000)};
            if (!has_slept && since_slept < MANY_BYTES) {
                nanosleep(&gap, NULL);
                has_slept = 1;
            } else {
                sleep_until_woken(of->to_thread, of->descriptor, -1);
                has_slept = 0;
            }
            since_slept = 0;
            continue;
        }
        has_slept = 0;
        if (more > 0) since_slept += (size_t)more;
        pthread_mutex_lock(&of->lock);
        if (more > 0) of->filled += (size_t)more;
        else {
            of->is_over = 1;
            of->problem = problem;
        }
        int is_awaited = of->wanted && (of->filled >= of->wanted || of->is_over);
        if (is_awaited) of->wanted = 0;
        pthread_mutex_unlock(&of->lock);
        if (is_awaited) wake(of->to_taker);
        if (more <= 0) return NULL;
    }
}

/* Sleep until there are so many bytes, or the end, or for so many microseconds. The lock is held by the caller. */
static void await(Receiver *of, size_t wanted, int64_t micros) {
    of->wanted = wanted;
    pthread_mutex_unlock(&of->lock);
    sleep_until_woken(of->to_taker, -1, micros);
    pthread_mutex_lock(&of->lock);
    of->wanted = 0;
}

static void stop_thread(Receiver *of) {
    /* After a fork there is no thread in the new process, which closes its own descriptors alone. */
    if (of->is_started && of->process == getpid()) {
        pthread_mutex_lock(&of->lock);
        of->is_stopped = 1;
        pthread_mutex_unlock(&of->lock);
        wake(of->to_thread);
        pthread_join(of->thread, NULL);
    }
    of->is_started = 0;
    of->is_over = 1;
    if (of->descriptor >= 0) close(of->descriptor);
    of->descriptor = -1;
}

static void destroy(PyObject *capsule) {
    Receiver *of = PyCapsule_GetPointer(capsule, RECEIVER);
    Py_BEGIN_ALLOW_THREADS
    stop_thread(of);
    for (int i = 0; i < 2; i++) {
        if (of->to_thread[i] >= 0) close(of->to_thread[i]);
        if (of->to_taker[i] >= 0) close(of->to_taker[i]);
    }
    pthread_mutex_destroy(&of->lock);
    free(of->ring);
    free(of);
    Py_END_ALLOW_THREADS
}

static int make_pipe(int pipe_[2]) {
    if (pipe(pipe_) < 0) {
        pipe_[0] = pipe_[1] = -1;
        return -1;
    }
    for (int i = 0; i < 2; i++)
        if (fcntl(pipe_[i], F_SETFD, FD_CLOEXEC) < 0 || fcntl(pipe_[i], F_SETFL, O_NONBLOCK) < 0) return -1;
    return 0;
}

PyDoc_STRVAR(start_doc,
"start(descriptor, room) -> receiver\n\n"
"Start a thread that receives from a socket, at most `room` bytes ahead of `take`. Raises `OSError`.\n"
"A receiver is used by one thread at a time. Stop it before the socket is closed.");

static PyObject *start(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "start takes 2 arguments");
    int descriptor = (int)PyLong_AsLong(args[0]);
    Py_ssize_t room = PyLong_AsSsize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (room < 1) return PyErr_Format(PyExc_ValueError, "a receiver needs room");
    Receiver *of = calloc(1, sizeof *of);
    if (of == NULL || (of->ring = malloc((size_t)room)) == NULL) {
        free(of);
        return PyErr_NoMemory();
    }
    of->room = (size_t)room;
    of->process = getpid();
    of->to_thread[0] = of->to_thread[1] = of->to_taker[0] = of->to_taker[1] = -1;
    pthread_mutex_init(&of->lock, NULL);
    of->descriptor = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    PyObject *capsule = PyCapsule_New(of, RECEIVER, destroy);
    if (capsule == NULL) return NULL; /* No memory; what was opened is lost. */
    int problem = 0;
    if (of->descriptor < 0 || make_pipe(of->to_thread) < 0 || make_pipe(of->to_taker) < 0) problem = errno;
    else {
        /* Signals are for the interpreter's threads. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        problem = pthread_create(&of->thread, NULL, receive_ahead, of);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        of->is_started = !problem;
    }
    if (!problem) return capsule;
    Py_DecRef(capsule);
    errno = problem;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Return the receiver, which nobody else uses until `leave`; NULL with an error set. */
static Receiver *enter(PyObject *capsule) {
    Receiver *of = PyCapsule_GetPointer(capsule, RECEIVER);
    if (of == NULL) return NULL;
    if (of->is_taking || of->process != getpid()) {
        PyErr_SetString(PyExc_RuntimeError, "the receiver is used by another thread or process");
        return NULL;
    }
    of->is_taking = 1;
    return of;
}

static void leave(Receiver *of) { of->is_taking = 0; }

PyDoc_STRVAR(take_doc,
"take(receiver, into, enough, idle_micros, most_micros) -> int | None\n\n"
"Take what has arrived, and what arrives next: until there are `enough` bytes, `into` is full, nothing has come for\n"
"`idle_micros`, or `most_micros` have passed. Return the number of bytes, 0 at the end of the stream; None if nothing\n"
"has arrived, without waiting. Raises `OSError` if receiving failed, after all that came before.");

static PyObject *take(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "take takes 5 arguments");
    int64_t enough = PyLong_AsLongLong(args[2]), idle = PyLong_AsLongLong(args[3]), most = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (idle < 0 || most < 0 || most > LONGEST_MICROS) return PyErr_Format(PyExc_ValueError, "not a time to wait");
    Py_buffer view;
    if (PyObject_GetBuffer(args[1], &view, PyBUF_WRITABLE) < 0) return NULL;
    Receiver *of = enter(args[0]);
    if (of == NULL) {
        PyBuffer_Release(&view);
        return NULL;
    }
    size_t taken = 0;
    int is_over = 0, is_empty = 0, problem = 0;
    Py_BEGIN_ALLOW_THREADS
    if (enough > view.len) enough = view.len;
    if (enough > (int64_t)of->room) enough = (int64_t)of->room;
    pthread_mutex_lock(&of->lock);
    int64_t until = of->filled && (int64_t)of->filled < enough ? micros_now() + most : 0;
    while (until && !of->is_over && (int64_t)of->filled < enough) {
        size_t before = of->filled;
        int64_t left = until - micros_now();
        if (left <= 0) break;
        await(of, (size_t)enough, left < idle ? left : idle);
        if (of->filled == before) break;
    }
    taken = of->filled < (size_t)view.len ? of->filled : (size_t)view.len;
    size_t begin = of->begin;
    is_over = of->is_over;
    is_empty = !of->filled;
    problem = of->problem;
    pthread_mutex_unlock(&of->lock);
    /* The thread does not touch what it has filled. */
    size_t first = taken < of->room - begin ? taken : of->room - begin;
    memcpy(view.buf, of->ring + begin, first);
    memcpy((char *)view.buf + first, of->ring, taken - first);
    pthread_mutex_lock(&of->lock);
    of->begin = (begin + taken) % of->room;
    of->filled -= taken;
    int was_full = of->is_full && taken;
    if (was_full) of->is_full = 0;
    pthread_mutex_unlock(&of->lock);
    if (was_full) wake(of->to_thread);
    Py_END_ALLOW_THREADS
    leave(of);
    PyBuffer_Release(&view);
    if (!taken && is_over && !is_empty) return Py_NewRef(Py_None);
    if (!taken && is_over && problem) {
        errno = problem;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!taken && !is_over) return Py_NewRef(Py_None);
    return PyLong_FromSize_t(taken);
}

PyDoc_STRVAR(wait_doc,
"wait(receiver, micros) -> bool\n\n"
"Wait until something has arrived, or the stream has ended, at most so long. Return whether it has.");

static PyObject *wait_(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2) return PyErr_Format(PyExc_TypeError, "wait takes 2 arguments");
    int64_t micros = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (micros > LONGEST_MICROS) micros = LONGEST_MICROS;
    Receiver *of = enter(args[0]);
    if (of == NULL) return NULL;
    int is_there;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&of->lock);
    if (!of->filled && !of->is_over && micros > 0) await(of, 1, micros);
    is_there = of->filled || of->is_over;
    pthread_mutex_unlock(&of->lock);
    Py_END_ALLOW_THREADS
    leave(of);
    return PyBool_FromLong(is_there);
}

PyDoc_STRVAR(stop_doc,
"stop(receiver) -> None\n\n"
"Stop the thread, and wait for its end. What has arrived can still be taken.");

static PyObject *stop(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 1) return PyErr_Format(PyExc_TypeError, "stop takes 1 argument");
    Receiver *of = enter(args[0]);
    if (of == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS
    stop_thread(of);
    Py_END_ALLOW_THREADS
    leave(of);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, start_doc},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, take_doc},
    {"wait", (PyCFunction)(void (*)(void))wait_, METH_FASTCALL, wait_doc},
    {"stop", (PyCFunction)(void (*)(void))stop, METH_FASTCALL, stop_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_receiver", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_receiver(void) { return PyModule_Create(&module); }
