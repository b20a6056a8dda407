/* Reads columns of many row images in one pass, and proves each image flat: a compact JSON object of texts and nulls
   with distinct names. `flat_images.py` says what is meant; it reads what is not proven here by other means.

   Nothing is read outside the images. They are UTF-8. The interpreter's lock is not held meanwhile. */

#define _GNU_SOURCE /* memmem */
#include "../compiled_texts.h"

/* More members that are not looked for leave an image to the other way: their names are compared with one another. */
enum { MOST_OTHERS = 64 };

typedef struct {
    const uint8_t *text;
    int64_t size;
} Name;

typedef struct {
    Column *texts;  /* of the first `read` names */
    uint8_t *sent;  /* names × images */
    uint8_t *proven, *others;
    const uint8_t *names;
    const int32_t *name_at;
    int64_t looked_for, read, images;
} Reading;

static int hexadecimal(uint8_t byte) {
    if (byte >= '0' && byte <= '9') return byte - '0';
    byte |= 0x20;
    return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

/* Read the escape behind a backslash, `\u0001` to `\u00ff` or one letter, as UTF-8 of `*size` bytes; return where it
   ends, or NULL. */
static const uint8_t *unescaped(const uint8_t *at, const uint8_t *stop, uint8_t *into, int *size) {
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    if (at == stop) return NULL;
    *size = 1;
    const char *found = *at ? strchr(letters, *at) : NULL;
    if (found != NULL) {
        *into = (uint8_t)meant[found - letters];
        return at + 1;
    }
    if (*at != 'u' || stop - at < 5 || at[1] != '0' || at[2] != '0') return NULL;
    int high = hexadecimal(at[3]), low = hexadecimal(at[4]), code = high * 16 + low;
    if (high < 0 || low < 0 || !code) return NULL;
    if (code < 0x80)
        *into = (uint8_t)code;
    else {
        into[0] = (uint8_t)(0xc0 | code >> 6);
        into[1] = (uint8_t)(0x80 | (code & 0x3f));
        *size = 2;
    }
    return at + 5;
}

/* Read a text behind its first quote into `column` (NULL: nowhere); return where it ends, or NULL if it is odd. */
static const uint8_t *read_text(Column *column, const uint8_t *at, const uint8_t *stop, int *code) {
    for (;;) {
        if (column != NULL) {
            const uint8_t *limit = stop - at > 1024 ? at + 1024 : stop;
            if ((*code = reserve(column, (size_t)(limit - at) + 16))) return NULL;
            at = put_plain(column, at, limit);
            if (at == limit && limit < stop) continue;
        } else
            at = past_plain(at, stop);
        if (at == stop || *at < 0x20) return NULL;
        if (*at == '"') return at + 1;
        uint8_t bytes[2];
        int size;
        if ((at = unescaped(at + 1, stop, bytes, &size)) == NULL) return NULL;
        if (column != NULL) put(column, bytes, (size_t)size);
    }
}

/* Return the number of the name that is looked for, or -1. Names mostly come in their order. */
static int64_t number_of(const Reading *of, const uint8_t *name, int64_t size, int64_t expected) {
    for (int64_t i = 0; i < of->looked_for; i++) {
        int64_t number = expected + i;
        if (number >= of->looked_for) number -= of->looked_for;
        int64_t at = of->name_at[number];
        if (of->name_at[number + 1] - at == size && !memcmp(of->names + at, name, (size_t)size)) return number;
    }
    return -1;
}

static int is_among(const Name *names, int64_t count, const Name *name) {
    for (int64_t i = 0; i < count; i++)
        if (names[i].size == name->size && !memcmp(names[i].text, name->text, (size_t)name->size)) return 1;
    return 0;
}

/* Whether the image from `at` to `stop` is proven; otherwise what was written of it does not count. */
static int read_image(Reading *of, const uint8_t *at, const uint8_t *stop, int64_t image, int *code) {
    Name others[MOST_OTHERS];
    int64_t expected = 0, other_count = 0;
    if (stop - at < 2 || *at++ != '{') return 0;
    if (*at == '}') return at + 1 == stop;
    for (;;) {
        if (at == stop || *at++ != '"') return 0;
        Name name = {at, 0};
        at = past_plain(at, stop);
        /* A name with an escape can be written in several ways. */
        if (at == stop || *at != '"') return 0;
        name.size = at++ - name.text;
        if (at == stop || *at++ != ':') return 0;
        int64_t number = number_of(of, name.text, name.size, expected);
        Column *column = NULL;
        if (number >= 0) {
            uint8_t *sent = of->sent + number * of->images + image;
            if (*sent) return 0;
            *sent = 1;
            expected = number + 1 < of->looked_for ? number + 1 : 0;
            if (number < of->read) column = of->texts + number;
        } else {
            if (other_count == MOST_OTHERS || is_among(others, other_count, &name)) return 0;
            others[other_count++] = name;
            of->others[image] = 1;
        }
        if (stop - at >= 4 && !memcmp(at, "null", 4))
            at += 4;
        else {
            if (at == stop || *at++ != '"') return 0;
            if ((at = read_text(column, at, stop, code)) == NULL) return 0;
            if (column != NULL) end_row(column, image, 1);
        }
        if (at == stop) return 0;
        if (*at == '}') return at + 1 == stop;
        if (*at++ != ',') return 0;
    }
}

static int read_all(Reading *of, const uint8_t *data, const int32_t *offsets, const uint8_t *valid, int64_t first) {
    int code = DONE;
    for (int64_t i = 0; i < of->images && !code; i++) {
        int is_there = valid == NULL || (valid[(first + i) / 8] >> ((first + i) % 8) & 1);
        of->proven[i] = (uint8_t)(is_there && read_image(of, data + offsets[i], data + offsets[i + 1], i, &code));
        if (!of->proven[i]) {
            of->others[i] = 0;
            for (int64_t name = 0; name < of->looked_for; name++) of->sent[name * of->images + i] = 0;
        }
        for (int64_t name = 0; name < of->read; name++) {
            Column *column = of->texts + name;
            if (!of->proven[i]) {
                column->size = (size_t)column->offsets[i];
                column->valid[i / 8] &= (uint8_t)~(1 << (i % 8));
            }
            column->offsets[i + 1] = (int32_t)column->size;
        }
    }
    return code;
}

PyDoc_STRVAR(read_doc,
"read(data, offsets, valid, first, (names, name_at), texts) -> (proven, columns, sent, others)\n\n"
"Read the images of an Arrow array: `data` and `offsets` (int32); `valid`, its bits from number `first` on, or None.\n"
"`names` (where `name_at` says, int32) are looked for, and the texts of the first `texts` of them are read. `proven`,\n"
"`sent` (names x images) and `others` are flags (uint8).");

static PyObject *read_images(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static const size_t sizes[4] = {1, 4, 1, 4};
    if (count != 6 || !is_pair(args[4]))
        return PyErr_Format(PyExc_TypeError, "read takes 6 arguments, the fifth of them a pair");
    int64_t first = PyLong_AsLongLong(args[3]), read = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    PyObject *const arrays[4] = {args[0], args[1], PyTuple_GetItem(args[4], 0), PyTuple_GetItem(args[4], 1)};
    Argument of[4] = {0}, valid = {0};
    Reading reading = {0};
    PyObject *result = NULL, *columns = NULL, *flags[3] = {0};
    static const size_t one = 1;
    if (open_all(of, arrays, sizes, 4) < 0) goto end;
    if (args[2] != Py_None && open_all(&valid, &args[2], &one, 1) < 0) goto end;
    const int32_t *offsets = of[1].view.buf;
    reading.names = of[2].view.buf;
    reading.name_at = of[3].view.buf;
    reading.looked_for = items(of + 3, 4) - 1;
    reading.read = read;
    reading.images = items(of + 1, 4) - 1;
    int is_whole = reading.images >= 0 && reading.looked_for >= 0 && read >= 0 && read <= reading.looked_for && first >= 0 &&
                   (!valid.is_open || has_bits(valid.view.len, first, reading.images));
    for (int64_t i = 0; is_whole && i <= reading.looked_for; i++)
        is_whole = reading.name_at[i] >= (i ? reading.name_at[i - 1] : 0) && reading.name_at[i] <= of[2].view.len;
    for (int64_t i = 0; is_whole && i <= reading.images; i++)
        is_whole = offsets[i] >= (i ? offsets[i - 1] : 0) && offsets[i] <= of[0].view.len;
    if (!is_whole) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit each other");
        goto end;
    }
    int code = DONE;
    reading.texts = calloc((size_t)read + 1, sizeof *reading.texts);
    reading.sent = calloc((size_t)(reading.looked_for * reading.images) + 1, 1);
    reading.proven = calloc((size_t)reading.images + 1, 1);
    reading.others = calloc((size_t)reading.images + 1, 1);
    if (!reading.texts || !reading.sent || !reading.proven || !reading.others) code = NO_MEMORY;
    for (int64_t i = 0; i < read && !code; i++) code = column_begin(reading.texts + i, reading.images);
    if (!code) {
        Py_BEGIN_ALLOW_THREADS
        code = read_all(&reading, of[0].view.buf, offsets, valid.is_open ? valid.view.buf : NULL, first);
        Py_END_ALLOW_THREADS
    }
    if (code) {
        raised(code);
        goto end;
    }
    if ((columns = PyTuple_New((Py_ssize_t)read)) == NULL) goto end;
    for (int64_t i = 0; i < read; i++) {
        PyObject *column = column_result(reading.texts + i, reading.images);
        if (column == NULL || PyTuple_SetItem(columns, (Py_ssize_t)i, column) < 0) goto end;
    }
    uint8_t **blocks[3] = {&reading.proven, &reading.sent, &reading.others};
    for (int i = 0; i < 3; i++) {
        size_t size = (size_t)(i == 1 ? reading.looked_for * reading.images : reading.images);
        if ((flags[i] = owned((void **)blocks[i], size)) == NULL) goto end;
    }
    result = PyTuple_Pack(4, flags[0], columns, flags[1], flags[2]);
end:
    Py_XDECREF(columns);
    for (int i = 0; i < 3; i++) Py_XDECREF(flags[i]);
    for (int64_t i = 0; reading.texts != NULL && i < read; i++) column_free(reading.texts + i);
    free(reading.texts);
    free(reading.sent);
    free(reading.proven);
    free(reading.others);
    close_all(&valid, 1);
    close_all(of, 4);
    return result;
}

PyDoc_STRVAR(contains_doc,
"contains(data, start, stop, wanted) -> bool\n\n"
"Whether the bytes `wanted` occur in `data` from `start` to `stop`.");

static PyObject *contains(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static const size_t sizes[2] = {1, 1};
    if (count != 4) return PyErr_Format(PyExc_TypeError, "contains takes 4 arguments");
    int64_t start = PyLong_AsLongLong(args[1]), stop = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    PyObject *given[2] = {args[0], args[3]}, *result = NULL;
    Argument of[2] = {0};
    if (open_all(of, given, sizes, 2) < 0) goto end;
    if (start < 0 || start > stop || stop > of[0].view.len) {
        PyErr_SetString(PyExc_ValueError, "start and stop are not within the data");
        goto end;
    }
    int is_there = of[1].view.len == 0;
    Py_BEGIN_ALLOW_THREADS
    if (!is_there && start < stop)
        is_there = memmem((const uint8_t *)of[0].view.buf + start, (size_t)(stop - start), of[1].view.buf,
                          (size_t)of[1].view.len) != NULL;
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(is_there);
end:
    close_all(of, 2);
    return result;
}

static PyMethodDef methods[] = {
    {"contains", (PyCFunction)(void (*)(void))contains, METH_FASTCALL, contains_doc},
    {"read", (PyCFunction)(void (*)(void))read_images, METH_FASTCALL, read_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_images", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_images(void) { return PyModule_Create(&module); }
