/* Reads PostgreSQL's texts of numbers, dates and times in one pass over a column. `plain_texts.py` says what is meant.

   A text is plain if it is spelled in the usual way; every other text is left to the exact reader. Texts, and the bits
   of those that are not null, are as Arrow has them; nothing is read outside them. The interpreter's lock is not held
   meanwhile. */

#include "../compiled_arrays.h"

typedef struct {
    Argument of[2], valid;
    const uint8_t *data;
    const int32_t *offsets;
    int64_t first, count;
} Texts;

typedef struct {
    uint8_t *plain, *known; /* bits, the lowest first, as Arrow has them; `known` only if some text may be null */
    int64_t *numbers;
} Found;

/* Open the arguments (data, offsets, valid, first) and check that they fit each other. */
static int open_texts(Texts *texts, PyObject *const *args) {
    static const size_t sizes[2] = {1, 4}, one = 1;
    memset(texts, 0, sizeof *texts);
    texts->first = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() || open_all(texts->of, args, sizes, 2) < 0) return -1;
    if (args[2] != Py_None && open_all(&texts->valid, args + 2, &one, 1) < 0) return -1;
    texts->data = texts->of[0].view.buf;
    texts->offsets = texts->of[1].view.buf;
    texts->count = items(texts->of + 1, 4) - 1;
    int fits = texts->count >= 0 && texts->first >= 0 &&
               (!texts->valid.is_open || has_bits(texts->valid.view.len, texts->first, texts->count));
    for (int64_t i = 0; fits && i <= texts->count; i++)
        fits = texts->offsets[i] >= (i ? texts->offsets[i - 1] : 0) && texts->offsets[i] <= texts->of[0].view.len;
    if (fits) return 0;
    PyErr_SetString(PyExc_ValueError, "the arguments do not fit each other");
    return -1;
}

static void close_texts(Texts *texts) {
    close_all(&texts->valid, 1);
    close_all(texts->of, 2);
}

static int begin(Found *found, const Texts *texts, int has_numbers) {
    size_t bytes = (size_t)texts->count / 8 + 1;
    memset(found, 0, sizeof *found);
    found->plain = calloc(bytes, 1);
    if (texts->valid.is_open) found->known = calloc(bytes, 1);
    if (has_numbers) found->numbers = calloc((size_t)texts->count + 1, sizeof *found->numbers);
    if (found->plain && (found->known || !texts->valid.is_open) && (found->numbers || !has_numbers)) return 0;
    PyErr_NoMemory();
    return -1;
}

static void end(Found *found) {
    free(found->plain);
    free(found->known);
    free(found->numbers);
}

/* Return (plain, known or None) or, with numbers, (plain, known or None, numbers). */
static PyObject *result_of(Found *found, const Texts *texts) {
    size_t bytes = ((size_t)texts->count + 7) / 8;
    PyObject *known = NULL, *numbers = NULL, *result = NULL, *plain = owned((void **)&found->plain, bytes);
    if (plain == NULL) goto end;
    if (found->known == NULL)
        Py_INCREF(known = Py_None);
    else if ((known = owned((void **)&found->known, bytes)) == NULL)
        goto end;
    if (found->numbers == NULL)
        result = PyTuple_Pack(2, plain, known);
    else if ((numbers = owned((void **)&found->numbers, (size_t)texts->count * sizeof(int64_t))) != NULL)
        result = PyTuple_Pack(3, plain, known, numbers);
end:
    Py_XDECREF(plain);
    Py_XDECREF(known);
    Py_XDECREF(numbers);
    return result;
}

/* Whether text `i` is not null, which is noted. */
static inline int is_known(const Texts *texts, Found *found, int64_t i) {
    if (!texts->valid.is_open) return 1;
    int64_t bit = texts->first + i;
    if (!(((const uint8_t *)texts->valid.view.buf)[bit / 8] >> (bit % 8) & 1)) return 0;
    found->known[i / 8] |= (uint8_t)(1 << (i % 8));
    return 1;
}

static inline void set_plain(Found *found, int64_t i, int is_plain) {
    found->plain[i / 8] |= (uint8_t)(is_plain << (i % 8));
}

/* ---- numbers ---- */

static inline const uint8_t *past_digits(const uint8_t *at, const uint8_t *stop, int64_t most) {
    const uint8_t *limit = stop - at > most ? at + most : stop;
    while (at < limit && (uint8_t)(*at - '0') < 10) at++;
    return at;
}

static inline int whole(const uint8_t *at, const uint8_t *stop, const int64_t *most, int64_t *number) {
    int is_negative = at < stop && *at == '-';
    at += is_negative;
    if (at == stop || past_digits(at, stop, *most) != stop) return 0;
    int64_t value = 0;
    while (at < stop) value = 10 * value + (*at++ - '0');
    *number = is_negative ? -value : value;
    return 1;
}

static inline int key(const uint8_t *at, const uint8_t *stop, const int64_t *most, int64_t *number) {
    if (stop - at < 5 || memcmp(at, "[\"", 2) || memcmp(stop - 2, "\"]", 2)) return 0;
    const uint8_t *digits = at + 2 + (at[2] == '-');
    /* Only 0 itself begins with 0. */
    if (*digits == '0' && stop - at != 5) return 0;
    return whole(at + 2, stop - 2, most, number);
}

static inline int decimal(const uint8_t *at, const uint8_t *stop, const int64_t *most, int64_t *number) {
    (void)number;
    at += at < stop && *at == '-';
    const uint8_t *end = past_digits(at, stop, most[0]);
    if (end == at) return 0;
    if (end < stop && *end == '.' && most[1]) {
        at = end + 1;
        if ((end = past_digits(at, stop, most[1])) == at) return 0;
    }
    if (end < stop && (*end | 0x20) == 'e' && most[2]) {
        at = end + 1;
        at += at < stop && (*at == '+' || *at == '-');
        if ((end = past_digits(at, stop, most[2])) == at) return 0;
    }
    return end == stop;
}

/* ---- dates and times ---- */

/* The number in two digits, or -1. */
static inline int two(const uint8_t *at) {
    unsigned tens = (unsigned)at[0] - '0', ones = (unsigned)at[1] - '0';
    return tens > 9 || ones > 9 ? -1 : (int)(tens * 10 + ones);
}

/* The days from 1970-01-01 to the day in the ten bytes at `at`; `*is_day` is 0 if they are no day of the years 1000 to
   9999. Source: days_from_civil of Howard Hinnant's "chrono-Compatible Low-Level Date Algorithms". */
static inline int64_t day(const uint8_t *at, int *is_day) {
    static const uint8_t lengths[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    int century = two(at), years = two(at + 2), month = two(at + 5), of_month = two(at + 8);
    int year = century * 100 + years;
    *is_day = 0;
    if (century < 10 || years < 0 || at[4] != '-' || at[7] != '-' || month < 1 || month > 12) return 0;
    int is_leap = year % 4 == 0 && (year % 100 || year % 400 == 0);
    if (of_month < 1 || of_month > lengths[month - 1] + (month == 2 && is_leap)) return 0;
    *is_day = 1;
    int64_t from_march = year - (month <= 2), era = from_march / 400, of_era = from_march - era * 400;
    int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + of_month - 1;
    return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

/* The minutes of the zone in the bytes from `at` to `stop`: none, Z, or hours and minutes. */
static inline int zone(const uint8_t *at, const uint8_t *stop, int *is_zone) {
    int64_t size = stop - at;
    *is_zone = size == 0 || (size == 1 && *at == 'Z');
    if (*is_zone || (size != 3 && size != 5 && size != 6) || (*at != '+' && *at != '-')) return 0;
    if (size == 6 && at[3] != ':') return 0;
    int hours = two(at + 1), minutes = size == 3 ? 0 : two(stop - 2);
    *is_zone = hours >= 0 && hours <= 15 && minutes >= 0 && minutes <= 59;
    return (*at == '-' ? -1 : 1) * (hours * 60 + minutes);
}

static inline int date(const uint8_t *at, const uint8_t *stop, const int64_t *none, int64_t *days) {
    int is_day = 0;
    (void)none;
    if (stop - at == 10) *days = day(at, &is_day);
    return is_day;
}

static inline int moment(const uint8_t *at, const uint8_t *stop, const int64_t *none, int64_t *micros) {
    static const int32_t scales[] = {1000000, 100000, 10000, 1000, 100, 10, 1};
    int is_day, is_zone;
    (void)none;
    if (stop - at < 19 || (at[10] != ' ' && at[10] != 'T') || at[13] != ':' || at[16] != ':') return 0;
    /* By a zone a moment of the last year may lie beyond the calendar, which the exact reader knows. */
    if (!memcmp(at, "9999", 4)) return 0;
    int64_t days = day(at, &is_day);
    int hour = two(at + 11), minute = two(at + 14), second = two(at + 17);
    if (!is_day || hour < 0 || hour > 23 || minute < 0 || minute > 59 || second < 0 || second > 59) return 0;
    int64_t fraction = 0;
    at += 19;
    if (at < stop && *at == '.') {
        const uint8_t *from = at + 1;
        if ((at = past_digits(from, stop, 6)) == from) return 0;
        for (const uint8_t *digit = from; digit < at; digit++) fraction = 10 * fraction + (*digit - '0');
        fraction *= scales[at - from];
    }
    int ahead = zone(at, stop, &is_zone);
    *micros = ((days * 24 + hour) * 60 + minute - ahead) * 60000000 + second * INT64_C(1000000) + fraction;
    return is_zone;
}

/* ---- the functions ---- */

/* Whether the text from `at` to `stop` is plain, and its number. */
typedef int (*Read)(const uint8_t *at, const uint8_t *stop, const int64_t *limits, int64_t *number);

/* Inlined in each function, and `read` with it. */
static inline PyObject *read_texts(PyObject *const *args, Read read, const int64_t *limits, int has_numbers) {
    Texts texts;
    Found found = {0};
    PyObject *result = NULL;
    if (open_texts(&texts, args) < 0 || begin(&found, &texts, has_numbers) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < texts.count; i++) {
        if (!is_known(&texts, &found, i)) continue;
        int64_t number = 0;
        int is_plain = read(texts.data + texts.offsets[i], texts.data + texts.offsets[i + 1], limits, &number);
        set_plain(&found, i, is_plain);
        if (has_numbers && is_plain) found.numbers[i] = number;
    }
    Py_END_ALLOW_THREADS
    result = result_of(&found, &texts);
end:
    end(&found);
    close_texts(&texts);
    return result;
}

PyDoc_STRVAR(wholes_doc,
"wholes(data, offsets, valid, first, digits) -> (plain, known, numbers)\n\n"
"Read the texts of an Arrow array: `data` and `offsets` (int32); `valid`, its bits from number `first` on, or None.\n"
"Plain are whole numbers of at most `digits` digits (1 to 18), which a `-` may precede. `plain` and `known` (not null;\n"
"None: all) are bits, `numbers` the numbers (int64, 0 where none is).");

static PyObject *wholes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "wholes takes 5 arguments");
    int64_t most = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (most < 1 || most > 18) return PyErr_Format(PyExc_ValueError, "digits must be 1 to 18");
    return read_texts(args, whole, &most, 1);
}

PyDoc_STRVAR(keys_doc,
"keys(data, offsets, valid, first) -> (plain, known, numbers)\n\n"
"Texts and results as for `wholes`. Plain are JSON arrays of one text that is a whole number of at most 18 digits,\n"
"without leading zeros.");

static PyObject *keys(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "keys takes 4 arguments");
    static const int64_t most = 18;
    return read_texts(args, key, &most, 1);
}

PyDoc_STRVAR(decimals_doc,
"decimals(data, offsets, valid, first, before, after, exponent) -> (plain, known)\n\n"
"Texts as for `wholes`. Plain are numbers, which a `-` may precede, with one to `before` digits and, where these are\n"
"not 0, at most `after` digits behind a point and at most `exponent` digits of an exponent.");

static PyObject *decimals(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 7) return PyErr_Format(PyExc_TypeError, "decimals takes 7 arguments");
    int64_t most[3];
    for (int i = 0; i < 3; i++) {
        most[i] = PyLong_AsLongLong(args[4 + i]);
        if (PyErr_Occurred()) return NULL;
        if (most[i] < (i == 0) || most[i] > 1000)
            return PyErr_Format(PyExc_ValueError, "before must be 1 to 1000, after and exponent 0 to 1000");
    }
    return read_texts(args, decimal, most, 0);
}

PyDoc_STRVAR(moments_doc,
"moments(data, offsets, valid, first, has_time) -> (plain, known, numbers)\n\n"
"Texts as for `wholes`. Plain are dates of the years 1000 to 9999 or, with `has_time`, times of 1000 to 9998, without\n"
"zone, with Z, or with one of at most 15:59 hours. `numbers`: days, or microseconds in UTC, from 1970-01-01 on.");

static PyObject *moments(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5) return PyErr_Format(PyExc_TypeError, "moments takes 5 arguments");
    int has_time = PyObject_IsTrue(args[4]);
    if (has_time < 0) return NULL;
    return has_time ? read_texts(args, moment, NULL, 1) : read_texts(args, date, NULL, 1);
}

static PyMethodDef methods[] = {
    {"decimals", (PyCFunction)(void (*)(void))decimals, METH_FASTCALL, decimals_doc},
    {"keys", (PyCFunction)(void (*)(void))keys, METH_FASTCALL, keys_doc},
    {"moments", (PyCFunction)(void (*)(void))moments, METH_FASTCALL, moments_doc},
    {"wholes", (PyCFunction)(void (*)(void))wholes, METH_FASTCALL, wholes_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_values", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_values(void) { return PyModule_Create(&module); }
