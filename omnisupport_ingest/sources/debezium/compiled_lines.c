/* Walks through many lines of JSON that one program wrote alike, one pass over the bytes.

   The caller says what comes next in every line: a text that is the same in all, or a value. A line with anything else
   is dropped, so every line that is left has been read byte by byte. `json_walk.py` says what each step is.

   Nothing is read outside the lines, whatever they hold. UTF-8 is not checked here. `walk` and `cut` do not hold the
   interpreter's lock while they work. */

#include "../../compiled_arrays.h"

/* As `json_walk.Step`. */
enum { EXPECT, TEXT, WHOLE, NUMBER, VARIABLE, FLAG, TEXTS, TEXTS_APART, STEPS };

enum { MOST_DIGITS = 19, LONGEST_NUMBER = 40, MOST_ELEMENTS = 100 };

typedef const uint8_t *Place;

static inline int is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

static inline int stands(Place at, Place stop, const char *text, size_t size) {
    return (size_t)(stop - at) >= size && !memcmp(at, text, size);
}

static inline int is_null(Place at, Place stop) { return stands(at, stop, "null", 4); }

/* Return where the text that begins with a quote at `at` ends, or NULL. It has no control character and only escapes
   that `json` writes, so the text between its quotes is the text that lands. */
static Place text(Place at, Place stop) {
    if (at == stop || *at++ != '"') return NULL;
    for (;;) {
        at = past_plain(at, stop);
        if (at == stop || *at < 0x20) return NULL;
        if (*at == '"') return at + 1;
        if (stop - at < 2 || memchr("\"\\bfnrt", at[1], 7) == NULL) return NULL;
        at += 2;
    }
}

/* A whole number of 64 bits, as JSON writes it. */
static Place whole(Place at, Place stop) {
    Place begin = at;
    int is_negative = at < stop && *at == '-';
    at += is_negative;
    Place digits = at;
    while (at < stop && is_digit(*at)) at++;
    int64_t count = at - digits;
    if (!count || count > MOST_DIGITS || (*digits == '0' && (count > 1 || is_negative))) return NULL;
    if (count == MOST_DIGITS && *digits == '9') {
        static const char limit[] = "9223372036854775807";
        int found = memcmp(digits, limit, MOST_DIGITS);
        int is_lowest = begin != digits && !memcmp(digits, "9223372036854775808", MOST_DIGITS);
        if (found > 0 && !is_lowest) return NULL;
    }
    return at;
}

/* A number as JSON writes it, of few characters. What follows cannot belong to a number. */
static Place number(Place at, Place stop) {
    Place begin = at;
    if (at < stop && *at == '-') at++;
    if (at == stop || !is_digit(*at)) return NULL;
    if (*at++ != '0')
        while (at < stop && is_digit(*at)) at++;
    if (at < stop && *at == '.') {
        if (++at == stop || !is_digit(*at)) return NULL;
        while (at < stop && is_digit(*at)) at++;
    }
    if (at < stop && (*at == 'e' || *at == 'E')) {
        at++;
        if (at < stop && (*at == '+' || *at == '-')) at++;
        if (at == stop || !is_digit(*at)) return NULL;
        while (at < stop && is_digit(*at)) at++;
    }
    if (at - begin > LONGEST_NUMBER) return NULL;
    return at < stop && *at != 0 && (is_digit(*at) || memchr("+-.eE", *at, 5)) ? NULL : at;
}

/* A decimal that has its own scale: {"scale":2,"value":"AQ=="}, or the same with a blank after colons and commas. */
static Place variable(Place at, Place stop) {
    if (!stands(at, stop, "{\"scale\":", 9)) return NULL;
    at += 9;
    if (at < stop && *at == ' ') at++;
    Place scale = at;
    if (at < stop && *at == '-') at++;
    Place digits = at;
    while (at < stop && is_digit(*at)) at++;
    if (at == digits || at - digits > 9 || (*digits == '0' && at - scale > 1)) return NULL;
    if (at == stop || *at++ != ',') return NULL;
    if (at < stop && *at == ' ') at++;
    if (!stands(at, stop, "\"value\":", 8)) return NULL;
    at += 8;
    if (at < stop && *at == ' ') at++;
    if (at == stop || *at++ != '"') return NULL;
    while (at < stop && (is_digit(*at) || (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') || *at == '+' || *at == '/'))
        at++;
    for (int i = 0; i < 2 && at < stop && *at == '='; i++) at++;
    return stands(at, stop, "\"}", 2) ? at + 2 : NULL;
}

static Place flag(Place at, Place stop) {
    return stands(at, stop, "true", 4) ? at + 4 : stands(at, stop, "false", 5) ? at + 5 : NULL;
}

/* A list of texts and nulls. `is_apart`: a blank follows each comma. */
static Place texts(Place at, Place stop, int is_apart) {
    if (at == stop || *at++ != '[') return NULL;
    if (at < stop && *at == ']') return at + 1;
    for (int i = 0; i < MOST_ELEMENTS; i++) {
        at = is_null(at, stop) ? at + 4 : text(at, stop);
        if (at == NULL || at == stop) return NULL;
        if (*at == ']') return at + 1;
        if (*at++ != ',' || (is_apart && (at == stop || *at++ != ' '))) return NULL;
    }
    return NULL;
}

static Place value(int step, Place at, Place stop) {
    switch (step) {
    case TEXT: return text(at, stop);
    case WHOLE: return whole(at, stop);
    case NUMBER: return number(at, stop);
    case VARIABLE: return variable(at, stop);
    case FLAG: return flag(at, stop);
    default: return texts(at, stop, step == TEXTS_APART);
    }
}

typedef struct {
    const uint8_t *content, *steps, *texts;
    const int32_t *text_at;
    int64_t step_count, slot_count;
} Program;

typedef struct {
    int64_t *lines, *begins, *ends; /* slots × lines; the first `kept` of each row count */
    uint8_t *is_null;
    int64_t stride, kept;
} Found;

static int has_form(const Program *program, Found *found, int64_t start, int64_t stop_at) {
    Place at = program->content + start, stop = program->content + stop_at;
    int64_t slot = found->kept, expected = 0;
    for (int64_t i = 0; i < program->step_count; i++) {
        int step = program->steps[i];
        if (step == EXPECT) {
            size_t size = (size_t)(program->text_at[expected + 1] - program->text_at[expected]);
            if (!stands(at, stop, (const char *)program->texts + program->text_at[expected++], size)) return 0;
            at += size;
            continue;
        }
        int nothing = is_null(at, stop);
        Place end = nothing ? at + 4 : value(step, at, stop);
        if (end == NULL) return 0;
        found->begins[slot] = at - program->content;
        found->ends[slot] = end - program->content;
        found->is_null[slot] = (uint8_t)nothing;
        slot += found->stride;
        at = end;
    }
    return at == stop;
}

PyDoc_STRVAR(walk_doc,
"walk(content, starts, stops, lines, steps, (texts, text_at)) -> (kept, begins, ends, is_null, count)\n\n"
"Return which of `lines` (int64, numbers in `starts` and `stops`) have the form of `steps` (uint8), and where their\n"
"values stand in `content`. `texts`: what is expected, where `text_at` (int32) says. `begins`, `ends` (int64) and\n"
"`is_null` have a row for each value and a column for each of `lines`; the first `count` columns are of `kept`.");

static PyObject *walk(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static const size_t sizes[7] = {1, 8, 8, 8, 1, 1, 4};
    if (count != 6 || !is_pair(args[5]))
        return PyErr_Format(PyExc_TypeError, "walk takes 6 arguments, the last of them a pair");
    PyObject *arrays[7] = {args[0], args[1], args[2], args[3], args[4], PyTuple_GetItem(args[5], 0), PyTuple_GetItem(args[5], 1)};
    Argument of[7] = {0};
    Found found = {0};
    PyObject *result = NULL, *parts[4] = {0};
    if (open_all(of, arrays, sizes, 7) < 0) goto end;
    Program program = {of[0].view.buf, of[4].view.buf, of[5].view.buf, of[6].view.buf, of[4].view.len, 0};
    const int64_t *starts = of[1].view.buf, *stops = of[2].view.buf, *lines = of[3].view.buf;
    int64_t all = items(of + 1, 8), wanted = items(of + 3, 8), expected = 0;
    int is_whole = items(of + 2, 8) == all;
    for (int64_t i = 0; is_whole && i < program.step_count; i++) {
        is_whole = program.steps[i] < STEPS;
        expected += program.steps[i] == EXPECT;
    }
    program.slot_count = program.step_count - expected;
    is_whole = is_whole && items(of + 6, 4) == expected + 1 && program.text_at[0] == 0 &&
               program.text_at[expected] <= of[5].view.len;
    for (int64_t i = 0; is_whole && i < expected; i++) is_whole = program.text_at[i] <= program.text_at[i + 1];
    for (int64_t i = 0; is_whole && i < wanted; i++) {
        is_whole = lines[i] >= 0 && lines[i] < all;
        is_whole = is_whole && starts[lines[i]] >= 0 && starts[lines[i]] <= stops[lines[i]] &&
                   stops[lines[i]] <= of[0].view.len;
    }
    if (!is_whole) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit each other");
        goto end;
    }
    found.stride = wanted;
    size_t values = (size_t)(wanted * program.slot_count);
    found.lines = malloc(((size_t)wanted + 1) * sizeof(int64_t));
    found.begins = malloc((values + 1) * sizeof(int64_t));
    found.ends = malloc((values + 1) * sizeof(int64_t));
    found.is_null = malloc(values + 1);
    if (!found.lines || !found.begins || !found.ends || !found.is_null) {
        PyErr_NoMemory();
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < wanted; i++)
        if (has_form(&program, &found, starts[lines[i]], stops[lines[i]])) found.lines[found.kept++] = lines[i];
    Py_END_ALLOW_THREADS
    parts[0] = owned((void **)&found.lines, (size_t)found.kept * sizeof(int64_t));
    parts[1] = parts[0] ? owned((void **)&found.begins, values * sizeof(int64_t)) : NULL;
    parts[2] = parts[1] ? owned((void **)&found.ends, values * sizeof(int64_t)) : NULL;
    parts[3] = parts[2] ? owned((void **)&found.is_null, values) : NULL;
    if (parts[3] != NULL) result = Py_BuildValue("(OOOOL)", parts[0], parts[1], parts[2], parts[3], (long long)found.kept);
end:
    for (int i = 0; i < 4; i++) Py_XDECREF(parts[i]);
    free(found.lines);
    free(found.begins);
    free(found.ends);
    free(found.is_null);
    close_all(of, 7);
    return result;
}

/* Open the arguments of a function of values: content, begins, ends, is_null. Return how many values, or -1. */
static int64_t open_values(Argument *of, PyObject *const *args, int64_t inside) {
    static const size_t sizes[4] = {1, 8, 8, 1};
    if (open_all(of, args, sizes, 4) < 0) return -1;
    const int64_t *begins = of[1].view.buf, *ends = of[2].view.buf;
    const uint8_t *nulls = of[3].view.buf;
    int64_t values = items(of + 1, 8), total = 0;
    int is_whole = items(of + 2, 8) == values && of[3].view.len == values;
    for (int64_t i = 0; is_whole && i < values; i++) {
        if (nulls[i]) continue;
        is_whole = begins[i] >= 0 && ends[i] <= of[0].view.len && ends[i] >= begins[i] && ends[i] - begins[i] >= 2 * inside;
        if (is_whole && (total += ends[i] - begins[i]) > INT32_MAX) {
            PyErr_SetString(PyExc_OverflowError, "the result is larger than one Arrow array can be");
            return -1;
        }
    }
    if (is_whole) return values;
    PyErr_SetString(PyExc_ValueError, "the arguments do not fit each other");
    return -1;
}

PyDoc_STRVAR(cut_doc,
"cut(content, begins, ends, is_null, inside) -> (offsets, data, valid)\n\n"
"Return the bytes of `content` from each of `begins` to its end (int64), without the first and last `inside`.\n"
"`is_null` (uint8): whether there is none.");

static PyObject *cut(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "cut takes 5 arguments");
    int64_t inside = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (inside < 0 || inside > 8) return PyErr_Format(PyExc_ValueError, "so many letters are not left out");
    Argument of[4] = {0};
    int32_t *offsets = NULL;
    uint8_t *data = NULL, *valid = NULL;
    PyObject *result = NULL, *parts[3] = {0};
    int64_t values = open_values(of, args, inside), total = 0, missing = 0;
    if (values < 0) goto end;
    const int64_t *begins = of[1].view.buf, *ends = of[2].view.buf;
    const uint8_t *nulls = of[3].view.buf, *content = of[0].view.buf;
    for (int64_t i = 0; i < values; i++) total += nulls[i] ? 0 : ends[i] - begins[i] - 2 * inside;
    offsets = malloc(((size_t)values + 1) * sizeof *offsets);
    data = malloc((size_t)total + 1);
    valid = calloc((size_t)values / 8 + 1, 1);
    if (!offsets || !data || !valid) {
        PyErr_NoMemory();
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    int64_t size = 0;
    offsets[0] = 0;
    for (int64_t i = 0; i < values; i++) {
        if (nulls[i])
            missing++;
        else {
            int64_t length = ends[i] - begins[i] - 2 * inside;
            memcpy(data + size, content + begins[i] + inside, (size_t)length);
            size += length;
            valid[i / 8] |= (uint8_t)(1 << (i % 8));
        }
        offsets[i + 1] = (int32_t)size;
    }
    Py_END_ALLOW_THREADS
    parts[0] = owned((void **)&offsets, ((size_t)values + 1) * sizeof *offsets);
    parts[1] = parts[0] ? owned((void **)&data, (size_t)total) : NULL;
    if (parts[1] != NULL) parts[2] = missing ? owned((void **)&valid, (size_t)values / 8 + 1) : Py_NewRef(Py_None);
    if (parts[2] != NULL) result = PyTuple_Pack(3, parts[0], parts[1], parts[2]);
end:
    for (int i = 0; i < 3; i++) Py_XDECREF(parts[i]);
    free(offsets);
    free(data);
    free(valid);
    close_all(of, 4);
    return result;
}

PyDoc_STRVAR(numbers_doc,
"numbers(content, begins, ends, is_null) -> block\n\n"
"Return the whole numbers of 64 bits that stand in `content` as `walk` found them (int64); 0 where there is none.");

static PyObject *numbers(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "numbers takes 4 arguments");
    Argument of[4] = {0};
    int64_t *found = NULL, values = open_values(of, args, 0);
    PyObject *result = NULL;
    if (values < 0) goto end;
    const int64_t *begins = of[1].view.buf, *ends = of[2].view.buf;
    const uint8_t *nulls = of[3].view.buf, *content = of[0].view.buf;
    if ((found = malloc(((size_t)values + 1) * sizeof *found)) == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    int is_whole = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; is_whole && i < values; i++) {
        uint64_t number = 0;
        Place at = content + begins[i], stop = content + ends[i];
        if (!nulls[i]) {
            is_whole = whole(at, stop) == stop;
            int is_negative = is_whole && *at == '-';
            for (at += is_negative; is_whole && at < stop; at++) number = 10 * number + (uint64_t)(*at - '0');
            if (is_negative) number = 0 - number;
        }
        memcpy(found + i, &number, sizeof number);
    }
    Py_END_ALLOW_THREADS
    if (is_whole)
        result = owned((void **)&found, (size_t)values * sizeof *found);
    else
        PyErr_SetString(PyExc_ValueError, "a value is no whole number of 64 bits");
end:
    free(found);
    close_all(of, 4);
    return result;
}

static PyMethodDef methods[] = {
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL, cut_doc},
    {"numbers", (PyCFunction)(void (*)(void))numbers, METH_FASTCALL, numbers_doc},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, walk_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_lines", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_lines(void) { return PyModule_Create(&module); }
