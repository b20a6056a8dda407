/* Hashes rows of tables: stored rows by the MD5 sum (RFC 1321) of one JSON array of texts (`row_hashes.py` says which),
   and events by a chain of XXH64 (xxHash specification 0.1.1; `event_hashes.py`).

   Nothing is read outside the given buffers, whatever they hold. The interpreter's lock is not held while rows are
   hashed. */

#include "../compiled_texts.h"

/* ---- MD5 ---- */

/* Messages that are written before they are summed: many, so that short and long ones fill all lanes, and few enough to
   stay in the processor's cache. */
enum { LANES = 8, LARGEST_PADDING = 72, MOST_MESSAGES = 128, MANY_BYTES = 128 * 1024 };

/* A number of each of some messages, which are summed side by side: a step of MD5 waits for the one before. */
typedef uint32_t Lanes __attribute__((vector_size(4 * LANES)));

static const uint32_t SINES[64] = {
    0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee, 0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501,
    0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be, 0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821,
    0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa, 0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8,
    0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed, 0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a,
    0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c, 0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70,
    0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05, 0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665,
    0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039, 0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1,
    0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1, 0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391,
};

static inline uint32_t word_at(const uint8_t *at) {
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Add a block of 64 bytes of each message. Each step is one of RFC 1321, section 3.4. */
static void add_blocks(Lanes sums[4], const uint8_t *const blocks[LANES]) {
    Lanes words[16], a = sums[0], b = sums[1], c = sums[2], d = sums[3];
    for (int i = 0; i < 16; i++)
        for (int lane = 0; lane < LANES; lane++) words[i][lane] = word_at(blocks[lane] + 4 * i);
#define STEP(mixed, a, b, word, number, by)                \
    {                                                      \
        Lanes sum = a + (mixed) + words[word] + SINES[number]; \
        a = b + (sum << by | sum >> (32 - by));            \
    }
#define ROUND(F, first, more, number, r0, r1, r2, r3)                          \
    for (int i = 0; i < 16; i += 4) {                                          \
        STEP(F(b, c, d), a, b, (first + more * i) % 16, number + i, r0)        \
        STEP(F(a, b, c), d, a, (first + more * (i + 1)) % 16, number + i + 1, r1) \
        STEP(F(d, a, b), c, d, (first + more * (i + 2)) % 16, number + i + 2, r2) \
        STEP(F(c, d, a), b, c, (first + more * (i + 3)) % 16, number + i + 3, r3) \
    }
#define IN_F(x, y, z) (z ^ (x & (y ^ z)))
#define IN_G(x, y, z) (y ^ (z & (x ^ y)))
#define IN_H(x, y, z) (x ^ y ^ z)
#define IN_I(x, y, z) (y ^ (x | ~z))
    ROUND(IN_F, 0, 1, 0, 7, 12, 17, 22)
    ROUND(IN_G, 1, 5, 16, 5, 9, 14, 20)
    ROUND(IN_H, 5, 3, 32, 4, 11, 16, 23)
    ROUND(IN_I, 0, 7, 48, 6, 10, 15, 21)
    sums[0] += a;
    sums[1] += b;
    sums[2] += c;
    sums[3] += d;
}

/* Pad the message that begins at `begin` of `text` to whole blocks. There must be room for LARGEST_PADDING bytes. */
static void end_message(Column *text, size_t begin) {
    uint64_t bits = (uint64_t)(text->size - begin) * 8;
    put_byte(text, 0x80);
    while ((text->size - begin) % 64 != 56) put_byte(text, 0);
    for (int i = 0; i < 8; i++) put_byte(text, (uint8_t)(bits >> (8 * i)));
}

/* Find for each padded message the first 8 bytes of its sum as a number, the lowest byte first. `ends`: where messages
   end in `text`; they follow one another. */
static void sum_messages(const uint8_t *text, const size_t *ends, int64_t count, uint64_t *found) {
    static const uint32_t start[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
    static const uint8_t nothing[64];
    const uint8_t *blocks[LANES];
    int64_t message[LANES], next = 0, left = count;
    Lanes sums[4];
    memset(sums, 0, sizeof sums);
    for (int lane = 0; lane < LANES; lane++) message[lane] = -1;
    for (;;) {
        for (int lane = 0; lane < LANES; lane++) {
            if (message[lane] >= 0 && blocks[lane] < text + ends[message[lane]]) continue;
            if (message[lane] >= 0) {
                found[message[lane]] = sums[0][lane] | (uint64_t)sums[1][lane] << 32;
                left--;
            }
            message[lane] = next < count ? next : -1;
            blocks[lane] = next < count ? text + (next ? ends[next - 1] : 0) : nothing;
            if (next < count) next++;
            for (int i = 0; i < 4; i++) sums[i][lane] = start[i];
        }
        if (!left) return;
        add_blocks(sums, blocks);
        for (int lane = 0; lane < LANES; lane++)
            if (message[lane] >= 0) blocks[lane] += 64;
    }
}

/* ---- XXH64 ---- */

static const uint64_t PRIME_1 = 0x9e3779b185ebca87, PRIME_2 = 0xc2b2ae3d27d4eb4f, PRIME_3 = 0x165667b19e3779f9,
                      PRIME_4 = 0x85ebca77c2b2ae63, PRIME_5 = 0x27d4eb2f165667c5;

static inline uint64_t turned(uint64_t number, int by) { return number << by | number >> (64 - by); }

static inline uint64_t little_endian(const uint8_t *at, int size) {
    uint64_t number = 0;
    for (int i = 0; i < size; i++) number |= (uint64_t)at[i] << (8 * i);
    return number;
}

static inline uint64_t lane_round(uint64_t lane, uint64_t number) {
    return turned(lane + number * PRIME_2, 31) * PRIME_1;
}

/* The steps are those of the specification, "XXH64 Algorithm Description". */
static uint64_t xxh64(const uint8_t *at, size_t size, uint64_t seed) {
    const uint8_t *stop = at + size;
    uint64_t found;
    if (size >= 32) {
        uint64_t lanes[4] = {seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1};
        for (; stop - at >= 32; at += 32)
            for (int i = 0; i < 4; i++) lanes[i] = lane_round(lanes[i], little_endian(at + 8 * i, 8));
        found = turned(lanes[0], 1) + turned(lanes[1], 7) + turned(lanes[2], 12) + turned(lanes[3], 18);
        for (int i = 0; i < 4; i++) found = (found ^ lane_round(0, lanes[i])) * PRIME_1 + PRIME_4;
    } else
        found = seed + PRIME_5;
    found += size;
    for (; stop - at >= 8; at += 8) found = turned(found ^ lane_round(0, little_endian(at, 8)), 27) * PRIME_1 + PRIME_4;
    if (stop - at >= 4) {
        found = turned(found ^ little_endian(at, 4) * PRIME_1, 23) * PRIME_2 + PRIME_3;
        at += 4;
    }
    for (; at < stop; at++) found = turned(found ^ *at * PRIME_5, 11) * PRIME_1;
    found = (found ^ found >> 33) * PRIME_2;
    found = (found ^ found >> 29) * PRIME_3;
    return found ^ found >> 32;
}

/* ---- the columns ---- */

enum { TEXT = 't', NUMBER = 'n', SHORT_NUMBER = 'i', CONSTANT = 'c' };

typedef struct {
    Py_buffer values, content, valid;
    int64_t first; /* of its rows in the buffers */
    uint8_t kind;
    int is_open[3];
} Source;

static void close_sources(Source *sources, Py_ssize_t count) {
    for (Py_ssize_t i = 0; sources != NULL && i < count; i++) {
        if (sources[i].is_open[0]) PyBuffer_Release(&sources[i].values);
        if (sources[i].is_open[1]) PyBuffer_Release(&sources[i].content);
        if (sources[i].is_open[2]) PyBuffer_Release(&sources[i].valid);
    }
    free(sources);
}

/* Open one of a column's buffers, which may be None. */
static int open_one(PyObject *given, Py_buffer *view, int *is_open) {
    memset(view, 0, sizeof *view);
    if (given == Py_None) return 0;
    if (PyObject_GetBuffer(given, view, PyBUF_SIMPLE) < 0) return -1;
    *is_open = 1;
    return 0;
}

/* Open a column: (kind, first, values, content, valid). */
static int open_source(PyObject *given, Source *source, int64_t rows) {
    PyObject *values, *content, *valid;
    int kind;
    long long first;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a column is a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(given, "CLOOO", &kind, &first, &values, &content, &valid)) return -1;
    if (open_one(values, &source->values, source->is_open) < 0 ||
        open_one(content, &source->content, source->is_open + 1) < 0 ||
        open_one(valid, &source->valid, source->is_open + 2) < 0)
        return -1;
    source->kind = (uint8_t)kind;
    source->first = first;
    int is_known = kind == TEXT || kind == NUMBER || kind == SHORT_NUMBER || kind == CONSTANT;
    size_t size = kind == NUMBER ? 8 : 4;
    if (!is_known || first < 0 || first > INT64_MAX / 8 - rows - 1 ||
        (kind != CONSTANT && source->values.len / (Py_ssize_t)size < first + rows + (kind == TEXT)) ||
        (uintptr_t)source->values.buf % size ||
        (source->is_open[2] && !has_bits(source->valid.len, first, rows))) {
        PyErr_SetString(PyExc_ValueError, "a column does not fit its rows");
        return -1;
    }
    return 0;
}

static inline int is_valid(const Source *source, int64_t row) {
    const uint8_t *bits = source->valid.buf;
    return bits == NULL || bits[(source->first + row) / 8] >> ((source->first + row) % 8) & 1;
}

/* Write a text between quotes, as DuckDB does. */
static int put_quoted(Column *into, const uint8_t *text, size_t size) {
    const uint8_t *end = text + size;
    int code = reserve(into, size + 16);
    if (code) return code;
    put_byte(into, '"');
    while ((text = put_plain(into, text, end)) < end) {
        if ((code = reserve(into, (size_t)(end - text) + 16))) return code;
        put_escaped(into, *text++, "0123456789ABCDEF");
    }
    put_byte(into, '"');
    return DONE;
}

static void put_number(Column *into, int64_t number) {
    char digits[24], *at = digits + sizeof digits;
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    *--at = '"';
    for (; left >= 10; left /= 100) {
        unsigned two = (unsigned)(left % 100);
        *--at = (char)('0' + two % 10);
        *--at = (char)('0' + two / 10);
    }
    if (left || !number) *--at = (char)('0' + left);
    if (number < 0) *--at = '-';
    *--at = '"';
    put(into, at, (size_t)(digits + sizeof digits - at));
}

/* Find the text of a row, which must not be null. */
static int text_of(const Source *source, int64_t row, const uint8_t **text, size_t *size) {
    const int32_t *bounds = (const int32_t *)source->values.buf + source->first + row;
    if (bounds[0] < 0 || bounds[0] > bounds[1] || bounds[1] > source->content.len) return ODD;
    *text = (const uint8_t *)source->content.buf + bounds[0];
    *size = (size_t)(bounds[1] - bounds[0]);
    return DONE;
}

static int64_t number_of(const Source *source, int64_t row) {
    int64_t at = source->first + row;
    return source->kind == NUMBER ? ((const int64_t *)source->values.buf)[at] : ((const int32_t *)source->values.buf)[at];
}

static int put_value(Column *into, const Source *source, int64_t row) {
    int code = reserve(into, 32);
    if (code) return code;
    if (!is_valid(source, row)) {
        put(into, "null", 4);
        return DONE;
    }
    if (source->kind == CONSTANT) return put_quoted(into, source->content.buf, (size_t)source->content.len);
    if (source->kind != TEXT) {
        put_number(into, number_of(source, row));
        return DONE;
    }
    const uint8_t *text;
    size_t size;
    code = text_of(source, row, &text, &size);
    return code ? code : put_quoted(into, text, size);
}

PyDoc_STRVAR(hash_rows_doc,
"hash_rows(rows, columns) -> block\n\n"
"Return for each row the first 8 bytes of the MD5 sum of the JSON array of its columns' texts (uint64, the lowest byte\n"
"first). A column is (kind, first, values, content, valid): `first`, its first row in the buffers; `valid`, the bits of\n"
"rows that are not null (None: all). Kinds: `t`, texts with offsets (int32) in `values`; `n` and `i`, whole numbers of\n"
"64 and 32 bits in `values`; `c`, the text `content` in every row.");

/* Open all columns of a tuple; NULL with an error set. Close them with `close_sources`. */
static Source *open_sources(PyObject *columns, int64_t rows) {
    Py_ssize_t count = PyTuple_Size(columns);
    Source *sources = calloc((size_t)count + 1, sizeof *sources);
    if (sources == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; sources != NULL && i < count; i++)
        if (open_source(PyTuple_GetItem(columns, i), sources + i, rows) < 0) {
            close_sources(sources, count);
            return NULL;
        }
    return sources;
}

/* Read the arguments of both functions: a number of rows, and a tuple of columns. */
static int read_arguments(PyObject *const *args, Py_ssize_t count, int64_t *rows) {
    if (count != 2 || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "the arguments are a number of rows and a tuple of columns");
        return -1;
    }
    *rows = PyLong_AsLongLong(args[0]);
    if (PyErr_Occurred()) return -1;
    if (*rows >= 0 && *rows <= INT64_MAX / 16) return 0;
    PyErr_SetString(PyExc_ValueError, "not a number of rows");
    return -1;
}

static PyObject *hashes_or_error(uint64_t **hashes, int64_t rows, int code) {
    if (!code) return owned((void **)hashes, (size_t)rows * sizeof **hashes);
    if (code != ODD) return raised(code);
    PyErr_SetString(PyExc_ValueError, "a text is not within its column");
    return NULL;
}

static PyObject *hash_rows(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    int64_t rows;
    if (read_arguments(args, count, &rows) < 0) return NULL;
    Py_ssize_t columns = PyTuple_Size(args[1]);
    Source *sources = open_sources(args[1], rows);
    if (sources == NULL) return NULL;
    uint64_t *hashes = malloc(((size_t)rows + 1) * sizeof *hashes);
    Column text = {0};
    size_t ends[MOST_MESSAGES];
    int64_t first = 0;
    int code = hashes == NULL ? NO_MEMORY : DONE;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; !code && row < rows; row++) {
        size_t begin = text.size;
        if ((code = reserve(&text, 2 + LARGEST_PADDING))) break;
        put_byte(&text, '[');
        for (Py_ssize_t i = 0; !code && i < columns; i++) {
            if (i) put_byte(&text, ',');
            if (!(code = put_value(&text, sources + i, row))) code = reserve(&text, 1 + LARGEST_PADDING);
        }
        if (code) break;
        put_byte(&text, ']');
        end_message(&text, begin);
        ends[row - first] = text.size;
        if (row + 1 == rows || row + 1 - first == MOST_MESSAGES || text.size >= MANY_BYTES) {
            sum_messages(text.data, ends, row + 1 - first, hashes + first);
            first = row + 1;
            text.size = 0;
        }
    }
    Py_END_ALLOW_THREADS
    PyObject *result = hashes_or_error(&hashes, rows, code);
    free(hashes);
    free(text.data);
    close_sources(sources, columns);
    return result;
}

PyDoc_STRVAR(hash_events_doc,
"hash_events(rows, columns, absent) -> block\n\n"
"Return a hash of each row (uint64): the XXH64 of its value in each column, whose seed is the hash so far, at first 42.\n"
"Columns are as of `hash_rows`, without constants; a number is hashed as its bytes, the lowest first. `absent` has for each\n"
"column the bytes that are hashed where it is null; None: null leaves the hash as it is.");

static int hash_of(const Source *source, const Py_buffer *absent, int64_t row, uint64_t *hash) {
    const uint8_t *bytes = absent->buf;
    size_t size = (size_t)absent->len;
    uint8_t number[8];
    if (!is_valid(source, row)) {
        if (bytes == NULL) return DONE;
    } else if (source->kind == TEXT) {
        if (text_of(source, row, &bytes, &size)) return ODD;
    } else {
        uint64_t held = (uint64_t)number_of(source, row);
        size = source->kind == NUMBER ? 8 : 4;
        for (size_t i = 0; i < size; i++) number[i] = (uint8_t)(held >> (8 * i));
        bytes = number;
    }
    *hash = xxh64(bytes, size, *hash);
    return DONE;
}

static PyObject *hash_events(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    int64_t rows;
    if (count != 3 || !PyTuple_Check(args[2])) return PyErr_Format(PyExc_TypeError, "hash_events takes 3 arguments");
    if (read_arguments(args, 2, &rows) < 0) return NULL;
    Py_ssize_t columns = PyTuple_Size(args[1]), opened = 0;
    if (PyTuple_Size(args[2]) != columns) return PyErr_Format(PyExc_ValueError, "not as many absent values as columns");
    PyObject *result = NULL;
    Source *sources = open_sources(args[1], rows);
    Py_buffer *absent = calloc((size_t)columns + 1, sizeof *absent);
    uint64_t *hashes = malloc(((size_t)rows + 1) * sizeof *hashes);
    if (sources == NULL) goto end;
    if (absent == NULL || hashes == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (; opened < columns; opened++) {
        PyObject *given = PyTuple_GetItem(args[2], opened);
        if (sources[opened].kind == CONSTANT) {
            PyErr_SetString(PyExc_ValueError, "a constant is not hashed");
            goto end;
        }
        if (given != Py_None && PyObject_GetBuffer(given, absent + opened, PyBUF_SIMPLE) < 0) goto end;
    }
    int code = DONE;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t row = 0; !code && row < rows; row++) {
        hashes[row] = 42;
        for (Py_ssize_t i = 0; !code && i < columns; i++) code = hash_of(sources + i, absent + i, row, hashes + row);
    }
    Py_END_ALLOW_THREADS
    result = hashes_or_error(&hashes, rows, code);
end:
    for (Py_ssize_t i = 0; absent != NULL && i < opened; i++)
        if (absent[i].obj != NULL) PyBuffer_Release(absent + i);
    free(absent);
    free(hashes);
    close_sources(sources, columns);
    return result;
}

static PyMethodDef methods[] = {
    {"hash_events", (PyCFunction)(void (*)(void))hash_events, METH_FASTCALL, hash_events_doc},
    {"hash_rows", (PyCFunction)(void (*)(void))hash_rows, METH_FASTCALL, hash_rows_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_hashes", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_hashes(void) { return PyModule_Create(&module); }
