/* A column of texts that grows, as Arrow has them, and the JSON that is written into it. */

#ifndef COMPILED_TEXTS_H
#define COMPILED_TEXTS_H

#include "compiled_arrays.h"

/* ---- growing columns of texts ---- */

typedef struct {
    uint8_t *data;
    size_t size, room;
    int32_t *offsets; /* one more than rows */
    uint8_t *valid;   /* bits, the lowest first, as Arrow has them */
} Column;

enum { DONE, NO_MEMORY, TOO_LARGE, ODD };

static int column_begin(Column *column, int64_t rows) {
    memset(column, 0, sizeof *column);
    column->offsets = calloc((size_t)rows + 1, sizeof(int32_t));
    column->valid = calloc((size_t)rows / 8 + 1, 1);
    return column->offsets != NULL && column->valid != NULL ? DONE : NO_MEMORY;
}

static void column_free(Column *column) {
    free(column->data);
    free(column->offsets);
    free(column->valid);
}

/* Make room for `more` bytes. */
static inline int reserve(Column *column, size_t more) {
    if (more <= column->room - column->size) return DONE;
    /* Offsets are of 32 bits, so there is never room for more than they can say. */
    if (more > INT32_MAX - column->size) return TOO_LARGE;
    size_t wanted = column->size + more, room = column->room + column->room / 2 + 65536;
    if (room < wanted) room = wanted;
    if (room > INT32_MAX) room = INT32_MAX;
    uint8_t *data = realloc(column->data, room);
    if (data == NULL) return NO_MEMORY;
    column->data = data;
    column->room = room;
    return DONE;
}

static inline void end_row(Column *column, int64_t row, int is_valid) {
    column->offsets[row + 1] = (int32_t)column->size;
    if (is_valid) column->valid[row / 8] |= (uint8_t)(1 << (row % 8));
}

static inline void put(Column *column, const void *bytes, size_t count) {
    memcpy(column->data + column->size, bytes, count);
    column->size += count;
}

static inline void put_byte(Column *column, uint8_t byte) { column->data[column->size++] = byte; }

/* ---- JSON ---- */

static const char HEXADECIMAL[] = "0123456789abcdef";

/* Write `byte`, which JSON escapes: at most six bytes. `digits`: the hexadecimal ones. */
static inline void put_escaped(Column *column, uint8_t byte, const char *digits) {
    uint8_t letter = 0;
    switch (byte) {
    case '"': case '\\': letter = byte; break;
    case '\b': letter = 'b'; break;
    case '\t': letter = 't'; break;
    case '\n': letter = 'n'; break;
    case '\f': letter = 'f'; break;
    case '\r': letter = 'r'; break;
    }
    put_byte(column, '\\');
    if (letter) {
        put_byte(column, letter);
        return;
    }
    put(column, "u00", 3);
    put_byte(column, (uint8_t)digits[byte >> 4]);
    put_byte(column, (uint8_t)digits[byte & 15]);
}

/* Copy bytes from `from` up to the next special one, or `end`. There must be room for all up to `end`. */
static inline const uint8_t *put_plain(Column *column, const uint8_t *from, const uint8_t *end) {
    uint8_t *to = column->data + column->size;
#ifdef __SSE2__
    while (end - from >= 16) {
        int plain = plain_of_sixteen(from, to);
        from += plain;
        to += plain;
        if (plain < 16) goto done;
    }
#endif
    while (end - from >= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        if (has_special(word)) break;
        memcpy(to, &word, 8);
        from += 8;
        to += 8;
    }
    while (from < end && !is_special(*from)) *to++ = *from++;
#ifdef __SSE2__
done:
#endif
    column->size = (size_t)(to - column->data);
    return from;
}

/* Write a text of PostgreSQL as it stands between the quotes of a JSON string. A text with NUL is odd. */
static inline int put_text(Column *column, const uint8_t *text, size_t size) {
    const uint8_t *end = text + size;
    int code = reserve(column, size + 8);
    if (code) return code;
    while ((text = put_plain(column, text, end)) < end) {
        if (*text == 0) return ODD;
        if ((code = reserve(column, (size_t)(end - text) + 8 + 6))) return code;
        put_escaped(column, *text++, HEXADECIMAL);
    }
    return DONE;
}

/* ---- the results ---- */

static inline PyObject *raised(int code) {
    if (code == NO_MEMORY) return PyErr_NoMemory();
    PyErr_SetString(PyExc_OverflowError, "the result is larger than one Arrow array can be");
    return NULL;
}

static int has_nulls(const Column *column, int64_t rows) {
    for (int64_t i = 0; i < rows / 8; i++)
        if (column->valid[i] != 0xff) return 1;
    return rows % 8 != 0 && column->valid[rows / 8] != (1 << (rows % 8)) - 1;
}

/* Return (offsets, data, valid) of a column of `rows` texts; valid is None if none is null. */
static PyObject *column_result(Column *column, int64_t rows) {
    if (column->data != NULL) {
        void *fitting = realloc(column->data, column->size ? column->size : 1);
        if (fitting != NULL) column->data = fitting;
    }
    PyObject *offsets = owned((void **)&column->offsets, ((size_t)rows + 1) * sizeof(int32_t));
    PyObject *data = offsets ? owned((void **)&column->data, column->size) : NULL;
    PyObject *valid = NULL;
    if (data != NULL) {
        valid = has_nulls(column, rows) ? owned((void **)&column->valid, (size_t)rows / 8 + 1) : Py_NewRef(Py_None);
    }
    if (valid == NULL) {
        Py_XDECREF(offsets);
        Py_XDECREF(data);
        return NULL;
    }
    return Py_BuildValue("(NNN)", offsets, data, valid);
}

#endif
