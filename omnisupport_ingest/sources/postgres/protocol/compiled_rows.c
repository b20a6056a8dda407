/* Converts what PostgreSQL sends into keys and row images, one pass over the bytes.

   `convert_changes` makes the JSON of row changes (TupleData, manual, "Logical Replication Message Formats"),
   `convert_lines` that of the lines of a COPY (manual, COPY, "Text Format") whose delimiter is the double quote. The
   JSON is byte for byte what `orjson` writes.

   What is not ordinary is left to `row_events.py` and `copy_rows.one_by_one`, which say what is meant: a change is
   marked as not converted, lines are refused as a whole. Nothing is read outside the given buffers, whatever they
   hold. UTF-8 is not checked here. The interpreter's lock is not held while bytes are read. */

#include "../../../compiled_texts.h"

enum { INSERT = 'I', UPDATE = 'U', DELETE = 'D', NEW = 'N', OLD_KEY = 'K', OLD_ROW = 'O' };
enum { TEXT = 't', NIL = 'n', UNSENT = 'u' };

/* Bytes before the payload of a WAL_DATA message; the letter of its first tuple follows kind and oid. */
enum { HEADER = 25, MARKER = HEADER + 5 };

/* What is said of a column. */
enum { IN_IDENTITY = 1, HIDDEN = 2, SAYS_SUBJECT = 4 };

/* ---- row changes ---- */

static uint32_t big_endian(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

typedef struct {
    const uint8_t *text;
    uint32_t size;
    uint8_t kind;
} Value;

typedef struct {
    const int64_t *columns, *first, *keys_of, *first_key, *keys;
    const uint8_t *partitioned, *has_identity, *flags;
    const uint8_t *names;
    const int32_t *name_at;
    int64_t tables, all_columns, all_keys;
} Tables;

/* The columns of the result, in the order in which they are returned. */
enum { KEY, BEFORE, AFTER, BEFORE_HIDDEN, BEFORE_SUBJECT, AFTER_HIDDEN, AFTER_SUBJECT, COLUMNS };

typedef struct {
    Column of[COLUMNS];
    int is_divided;
    int32_t *unsent_at, *unsent; /* per row where its names begin in `unsent`; numbers of columns */
    size_t unsent_count, unsent_room;
} Events;

/* Find the `columns` values of a tuple, of which nothing lies behind `limit`. Return where it ends, or NULL. */
static const uint8_t *tuple_values(const uint8_t *at, const uint8_t *limit, int64_t columns, Value *values, int64_t *unsent) {
    *unsent = 0;
    if (limit - at < 2 || ((int64_t)at[0] << 8 | at[1]) != columns || !columns) return NULL;
    at += 2;
    for (int64_t i = 0; i < columns; i++) {
        if (at >= limit) return NULL;
        Value *value = values + i;
        value->kind = *at++;
        value->text = at;
        value->size = 0;
        if (value->kind == TEXT) {
            if (limit - at < 4) return NULL;
            value->size = big_endian(at);
            value->text = at += 4;
            if (value->size > (size_t)(limit - at)) return NULL;
            at += value->size;
        } else if (value->kind == UNSENT)
            ++*unsent;
        else if (value->kind != NIL)
            return NULL;
    }
    return at;
}

static int put_value(Column *column, const Value *value) {
    int code = reserve(column, 6);
    if (code) return code;
    if (value->kind == NIL) {
        put(column, "null", 4);
        return DONE;
    }
    put_byte(column, '"');
    if ((code = put_text(column, value->text, value->size)) || (code = reserve(column, 2))) return code;
    put_byte(column, '"');
    return DONE;
}

static int put_key(Column *column, const Tables *tables, int64_t table, const Value *row, const Value *old) {
    const int64_t *keys = tables->keys + tables->first_key[table];
    int code;
    for (int64_t i = 0; i < tables->keys_of[table]; i++) {
        const Value *value = row + keys[i];
        if (value->kind == UNSENT && old != NULL) value = old + keys[i];
        if (value->kind == UNSENT) return ODD;
        if ((code = reserve(column, 1))) return code;
        put_byte(column, i ? ',' : '[');
        if ((code = put_value(column, value))) return code;
    }
    if (!tables->keys_of[table]) return DONE;
    if ((code = reserve(column, 1))) return code;
    put_byte(column, ']');
    return DONE;
}

/* Write one member of a JSON object; `members` is how many it has already. */
static int put_member(Column *column, const Tables *tables, int64_t number, const Value *value, int64_t members) {
    const uint8_t *name = tables->names + tables->name_at[number];
    size_t size = (size_t)(tables->name_at[number + 1] - tables->name_at[number]);
    int code = reserve(column, size + 1);
    if (code) return code;
    put_byte(column, members ? ',' : '{');
    put(column, name, size);
    return put_value(column, value);
}

/* Write the image of a tuple. `is_old`: columns without a meaning are left out. */
static int put_image(
    Events *events, const Tables *tables, int64_t table, const Value *row, int64_t at, int is_old, int is_key
) {
    int64_t shown = 0, hidden = 0, first = tables->first[table];
    int has_subject = 0, code;
    Column *image = events->of + (is_old ? BEFORE : AFTER);
    Column *of_hidden = events->of + (is_old ? BEFORE_HIDDEN : AFTER_HIDDEN);
    Column *subject = events->of + (is_old ? BEFORE_SUBJECT : AFTER_SUBJECT);
    for (int64_t i = 0; row != NULL && i < tables->columns[table]; i++) {
        const Value *value = row + i;
        uint8_t flags = tables->flags[first + i];
        if (value->kind == UNSENT) continue;
        /* A key tuple has nulls in all other columns, a tuple of a partition in those outside its identity. */
        if (is_old && is_key && !(flags & IN_IDENTITY)) continue;
        if (is_old && value->kind == NIL && tables->partitioned[table]) continue;
        int is_hidden = events->is_divided && (flags & HIDDEN);
        code = is_hidden ? put_member(of_hidden, tables, first + i, value, hidden++)
                         : put_member(image, tables, first + i, value, shown++);
        if (code) return code;
        if (events->is_divided && (flags & SAYS_SUBJECT) && value->kind == TEXT) {
            if ((code = put_text(subject, value->text, value->size))) return code;
            has_subject = 1;
        }
    }
    if (row != NULL && !shown && !hidden) return ODD;
    if ((code = reserve(image, 2)) || (code = reserve(of_hidden, 1))) return code;
    if (shown || hidden) {
        if (!shown) put_byte(image, '{');
        put_byte(image, '}');
    }
    if (hidden) put_byte(of_hidden, '}');
    end_row(image, at, shown || hidden);
    if (events->is_divided) {
        end_row(of_hidden, at, hidden > 0);
        end_row(subject, at, has_subject);
    }
    return DONE;
}

static int is_same(const Value *one, const Value *other) {
    return one->kind == other->kind && one->size == other->size && !memcmp(one->text, other->text, one->size);
}

/* Convert the message from `message` to `limit`, a change of `table`; ODD: nothing counts that was written. */
static int convert_change(
    Events *events, const Tables *tables, int64_t table, const uint8_t *message, const uint8_t *limit, int64_t at,
    Value *first, Value *second
) {
    if (limit - message <= MARKER || table < 0 || table >= tables->tables) return ODD;
    uint8_t kind = message[HEADER], marker = message[MARKER];
    int64_t columns = tables->columns[table], unsent, unsent_in_new = 0;
    const int64_t *keys = tables->keys + tables->first_key[table];
    Value *old = NULL, *row = NULL;
    const uint8_t *end = tuple_values(message + MARKER + 1, limit, columns, first, &unsent);
    if (end == NULL || unsent == columns) return ODD;
    if (marker == NEW && (kind == INSERT || kind == UPDATE)) {
        row = first;
        unsent_in_new = unsent;
    } else if ((marker == OLD_KEY || marker == OLD_ROW) && kind == DELETE) {
        old = first;
        if (marker == OLD_KEY && (unsent || !tables->has_identity[table])) return ODD;
    } else if (marker == OLD_ROW && kind == UPDATE) {
        old = first;
        row = second;
        if (end >= limit || *end != NEW) return ODD;
        end = tuple_values(end + 1, limit, columns, second, &unsent_in_new);
        if (end == NULL || unsent_in_new == columns) return ODD;
    } else
        return ODD;
    if (end != limit) return ODD;
    for (int64_t i = 0; old != NULL && i < tables->keys_of[table]; i++) {
        const Value *value = old + keys[i];
        /* A partition sends null for a column outside its replica identity. */
        if (value->kind == UNSENT || (value->kind == NIL && tables->partitioned[table])) return ODD;
        /* A change of the key gives two events. */
        if (row != NULL && row[keys[i]].kind != UNSENT && !is_same(value, row + keys[i])) return ODD;
    }
    int code = put_key(events->of + KEY, tables, table, row != NULL ? row : old, old);
    if (code) return code;
    end_row(events->of + KEY, at, tables->keys_of[table] > 0);
    if ((code = put_image(events, tables, table, old, at, 1, marker == OLD_KEY))) return code;
    if ((code = put_image(events, tables, table, row, at, 0, 0))) return code;
    if (unsent_in_new) {
        if (events->unsent_count + (size_t)unsent_in_new > events->unsent_room) {
            size_t room = 2 * events->unsent_room + (size_t)unsent_in_new + 1024;
            int32_t *more = room <= INT32_MAX ? realloc(events->unsent, room * sizeof *more) : NULL;
            if (more == NULL) return NO_MEMORY;
            events->unsent = more;
            events->unsent_room = room;
        }
        for (int64_t i = 0; i < columns; i++)
            if (row[i].kind == UNSENT) events->unsent[events->unsent_count++] = (int32_t)(tables->first[table] + i);
    }
    events->unsent_at[at + 1] = (int32_t)events->unsent_count;
    return DONE;
}

/* Take back what was written of row `at`; it is null in all columns. */
static void take_back(Events *events, int64_t at) {
    for (int i = 0; i < COLUMNS; i++) {
        Column *column = events->of + i;
        if (column->offsets == NULL) continue;
        column->valid[at / 8] &= (uint8_t)~(1 << (at % 8));
        column->size = (size_t)column->offsets[at];
        column->offsets[at + 1] = column->offsets[at];
    }
    events->unsent_count = (size_t)events->unsent_at[at];
    events->unsent_at[at + 1] = events->unsent_at[at];
}

/* Messages that lie in several buffers: of each where it begins and where it ends. */
typedef struct {
    Argument *of; /* three of each piece: the bytes, and where in them the messages start and end */
    int64_t pieces, rows;
    const uint8_t **starts, **ends;
    size_t bytes;
} Messages;

static void close_messages(Messages *messages) {
    if (messages->of != NULL) close_all(messages->of, (int)(3 * messages->pieces));
    free(messages->of);
    free(messages->starts);
    free(messages->ends);
}

/* Open the pieces, each a tuple (bytes, starts, ends). Return -1 with an error set if they are not whole. */
static int open_messages(Messages *messages, PyObject *pieces) {
    static const size_t sizes[3] = {1, 8, 8};
    Py_ssize_t count = PySequence_Size(pieces);
    if (count < 0) return -1;
    if (count > INT32_MAX / 3) return PyErr_NoMemory(), -1;
    if ((messages->of = calloc(3 * (size_t)count + 1, sizeof(Argument))) == NULL) return PyErr_NoMemory(), -1;
    messages->pieces = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Argument *of = messages->of + 3 * i;
        PyObject *piece = PySequence_GetItem(pieces, i), *parts[3] = {NULL, NULL, NULL};
        int is_open = piece != NULL;
        for (int part = 0; is_open && part < 3; part++) is_open = (parts[part] = PySequence_GetItem(piece, part)) != NULL;
        is_open = is_open && open_all(of, parts, sizes, 3) == 0;
        for (int part = 0; part < 3; part++) Py_XDECREF(parts[part]);
        Py_XDECREF(piece);
        if (!is_open) return -1;
        messages->rows += items(of + 1, 8);
    }
    messages->starts = malloc(((size_t)messages->rows + 1) * sizeof *messages->starts);
    messages->ends = malloc(((size_t)messages->rows + 1) * sizeof *messages->ends);
    if (messages->starts == NULL || messages->ends == NULL) return PyErr_NoMemory(), -1;
    int64_t row = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Argument *of = messages->of + 3 * i;
        const uint8_t *data = of[0].view.buf;
        const int64_t *starts = of[1].view.buf, *ends = of[2].view.buf;
        int64_t rows = items(of + 1, 8);
        int is_whole = items(of + 2, 8) == rows;
        for (int64_t at = 0; is_whole && at < rows; at++, row++) {
            is_whole = starts[at] >= 0 && starts[at] <= ends[at] && ends[at] <= of[0].view.len;
            if (!is_whole) break;
            messages->starts[row] = data + starts[at];
            messages->ends[row] = data + ends[at];
            messages->bytes += (size_t)(ends[at] - starts[at]);
        }
        if (!is_whole) {
            PyErr_SetString(PyExc_ValueError, "the messages are not within their bytes: they do not fit each other");
            return -1;
        }
    }
    return 0;
}

static int convert_all(
    Events *events, const Tables *tables, const Messages *messages, const int32_t *table_of, uint8_t *converted
) {
    int64_t most = 1;
    for (int64_t i = 0; i < tables->tables; i++)
        if (tables->columns[i] > most) most = tables->columns[i];
    Value *values = malloc(2 * (size_t)most * sizeof *values);
    int code = values == NULL ? NO_MEMORY : DONE;
    for (int64_t i = 0; i < messages->rows && !code; i++) {
        code = convert_change(
            events, tables, table_of[i], messages->starts[i], messages->ends[i], i, values, values + most);
        converted[i] = code == DONE;
        if (code == ODD) {
            take_back(events, i);
            code = DONE;
        }
    }
    free(values);
    return code;
}

PyDoc_STRVAR(convert_changes_doc,
"convert_changes(pieces, table_of, columns, first, keys_of, first_key, keys, partitioned,\n"
"    has_identity, flags, names, name_at, is_divided) -> (converted, columns, unsent_at, unsent)\n\n"
"Convert row changes: WAL_DATA messages, in tuples of bytes and where in them they start and end (int64).\n"
"See `parsed_rows.py` for the other arguments.");

enum {
    TABLE_OF, COLUMN_COUNTS, FIRST, KEYS_OF, FIRST_KEY, KEYS, PARTITIONED, HAS_IDENTITY, FLAGS,
    NAMES, NAME_AT, ARGUMENTS
};

static int tables_are_whole(const Tables *tables, const Argument *of) {
    int64_t all_names = of[NAMES].view.len;
    if (items(of + FIRST, 8) != tables->tables || items(of + KEYS_OF, 8) != tables->tables ||
        items(of + FIRST_KEY, 8) != tables->tables || of[PARTITIONED].view.len != tables->tables ||
        of[HAS_IDENTITY].view.len != tables->tables || items(of + NAME_AT, 4) != tables->all_columns + 1)
        return 0;
    for (int64_t i = 0; i < tables->tables; i++) {
        int64_t columns = tables->columns[i], first = tables->first[i], keys = tables->keys_of[i];
        int64_t first_key = tables->first_key[i];
        if (columns < 0 || columns > UINT16_MAX || first < 0 || first > tables->all_columns - columns) return 0;
        if (keys < 0 || first_key < 0 || first_key > tables->all_keys - keys) return 0;
        for (int64_t key = 0; key < keys; key++)
            if (tables->keys[first_key + key] < 0 || tables->keys[first_key + key] >= columns) return 0;
    }
    for (int64_t i = 0; i < tables->all_columns; i++)
        if (tables->name_at[i] < 0 || tables->name_at[i + 1] < tables->name_at[i]) return 0;
    return tables->name_at[tables->all_columns] <= all_names;
}

static PyObject *convert_changes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static const size_t sizes[ARGUMENTS] = {4, 8, 8, 8, 8, 8, 1, 1, 1, 1, 4};
    if (count != ARGUMENTS + 2) return PyErr_Format(PyExc_TypeError, "convert_changes takes %d arguments", ARGUMENTS + 2);
    int is_divided = PyObject_IsTrue(args[ARGUMENTS + 1]);
    Messages messages = {0};
    Argument of[ARGUMENTS] = {0};
    Events events = {0};
    uint8_t *converted = NULL;
    PyObject *result = NULL, *columns = NULL, *flags = NULL, *unsent_at = NULL, *unsent = NULL;
    if (is_divided < 0 || open_messages(&messages, args[0]) < 0 || open_all(of, args + 1, sizes, ARGUMENTS) < 0) goto end;
    int64_t rows = messages.rows;
    Tables tables = {
        of[COLUMN_COUNTS].view.buf, of[FIRST].view.buf, of[KEYS_OF].view.buf, of[FIRST_KEY].view.buf,
        of[KEYS].view.buf, of[PARTITIONED].view.buf, of[HAS_IDENTITY].view.buf, of[FLAGS].view.buf,
        of[NAMES].view.buf, of[NAME_AT].view.buf, items(of + COLUMN_COUNTS, 8), of[FLAGS].view.len, items(of + KEYS, 8),
    };
    if (items(of + TABLE_OF, 4) != rows || !tables_are_whole(&tables, of)) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit each other");
        goto end;
    }
    int code = DONE;
    events.is_divided = is_divided;
    int used = is_divided ? COLUMNS : BEFORE_HIDDEN;
    for (int i = 0; i < used && !code; i++) code = column_begin(events.of + i, rows);
    /* Most of what was sent is in images of new rows. A column that grows is copied each time. */
    if (!code && messages.bytes <= INT32_MAX) code = reserve(events.of + AFTER, messages.bytes);
    events.unsent_at = calloc((size_t)rows + 1, sizeof(int32_t));
    converted = malloc((size_t)rows + 1);
    if (events.unsent_at == NULL || converted == NULL) code = NO_MEMORY;
    if (!code) {
        Py_BEGIN_ALLOW_THREADS
        code = convert_all(&events, &tables, &messages, of[TABLE_OF].view.buf, converted);
        Py_END_ALLOW_THREADS
    }
    if (code) {
        raised(code);
        goto end;
    }
    if ((columns = PyTuple_New(used)) == NULL) goto end;
    for (int i = 0; i < used; i++) {
        PyObject *column = column_result(events.of + i, rows);
        if (column == NULL || PyTuple_SetItem(columns, i, column) < 0) goto end;
    }
    flags = PyBytes_FromStringAndSize((char *)converted, (Py_ssize_t)rows);
    unsent_at = PyBytes_FromStringAndSize((char *)events.unsent_at, (Py_ssize_t)(((size_t)rows + 1) * sizeof(int32_t)));
    unsent = PyBytes_FromStringAndSize((char *)events.unsent, (Py_ssize_t)(events.unsent_count * sizeof(int32_t)));
    if (flags && unsent_at && unsent) result = PyTuple_Pack(4, flags, columns, unsent_at, unsent);
end:
    Py_XDECREF(columns);
    Py_XDECREF(flags);
    Py_XDECREF(unsent_at);
    Py_XDECREF(unsent);
    for (int i = 0; i < COLUMNS; i++) column_free(events.of + i);
    free(events.unsent_at);
    free(events.unsent);
    free(converted);
    close_messages(&messages);
    close_all(of, ARGUMENTS);
    return result;
}

/* ---- lines of COPY ---- */

typedef struct {
    Column keys, images;
    /* Where the values of one row are in `images`, within the quotes; NULL is an empty piece before `null`. */
    int32_t *starts, *ends;
    /* The same of the columns that are asked for, of each row. */
    int32_t *places[2];
    int64_t rows;
} Lines;

/* Write one value of COPY up to its end as a JSON value; return where it ends, or NULL if it is odd. */
static const uint8_t *put_copied(Column *column, const uint8_t *at, const uint8_t *end, int32_t *start, int32_t *stop, int *code) {
    if (end - at >= 3 && at[0] == '\\' && at[1] == 'N' && (at[2] == '"' || at[2] == '\n')) {
        if ((*code = reserve(column, 4))) return NULL;
        *start = *stop = (int32_t)column->size;
        put(column, "null", 4);
        return at + 2;
    }
    if ((*code = reserve(column, 16))) return NULL;
    put_byte(column, '"');
    *start = (int32_t)column->size;
    for (;;) {
        /* Room for what is left of the block is not asked for: one value is seldom long. */
        const uint8_t *limit = end - at > 1024 ? at + 1024 : end;
        if ((*code = reserve(column, (size_t)(limit - at) + 16))) return NULL;
        at = put_plain(column, at, limit);
        if (at == limit) {
            if (at == end) return NULL;
            continue;
        }
        if (*at == '"' || *at == '\n') break;
        if (*at != '\\') {
            put_escaped(column, *at++, HEXADECIMAL);
            continue;
        }
        if (end - at < 2) return NULL;
        switch (at[1]) {
        case 'v': put(column, "\\u000b", 6); break;
        case 'b': case 'f': case 'n': case 'r': case 't': case '"': case '\\': put(column, at, 2); break;
        default: return NULL;
        }
        at += 2;
    }
    *stop = (int32_t)column->size;
    put_byte(column, '"');
    return at;
}

/* The columns of a COPY: their names, and the numbers of those of the key and of those that are asked for. */
typedef struct {
    const uint8_t *names;
    const int32_t *name_at, *key, *asked;
    int64_t count, keys, asked_for;
} Columns;

/* Convert the lines of `data`, each from `from` to `to` with its line end. */
static int convert_copied(Lines *lines, const uint8_t *data, const int64_t *from, const int64_t *to, const Columns *of) {
    int32_t *starts = lines->starts, *ends = lines->ends;
    const int32_t *name_at = of->name_at, *key = of->key;
    int64_t columns = of->count, keys = of->keys;
    int code = DONE;
    for (int64_t row = 0; row < lines->rows; row++) {
        const uint8_t *at = data + from[row], *end = data + to[row];
        for (int64_t i = 0; i < columns; i++) {
            size_t size = (size_t)(name_at[i + 1] - name_at[i]);
            if ((code = reserve(&lines->images, size + 2))) return code;
            put_byte(&lines->images, i ? ',' : '{');
            put(&lines->images, of->names + name_at[i], size);
            at = put_copied(&lines->images, at, end, starts + i, ends + i, &code);
            if (at == NULL) return code ? code : ODD;
            if (at == end || *at++ != (i + 1 < columns ? '"' : '\n')) return ODD;
        }
        if (at != end) return ODD;
        if ((code = reserve(&lines->images, 1))) return code;
        put_byte(&lines->images, '}');
        end_row(&lines->images, row, 1);
        for (int64_t i = 0; i < of->asked_for; i++) {
            lines->places[0][row * of->asked_for + i] = starts[of->asked[i]];
            lines->places[1][row * of->asked_for + i] = ends[of->asked[i]];
        }
        for (int64_t i = 0; i < keys; i++) {
            int32_t start = starts[key[i]], stop = ends[key[i]];
            const uint8_t *text = lines->images.data + start;
            int is_null = start == stop && *text == 'n';
            size_t size = is_null ? 4 : (size_t)(stop - start) + 2;
            if ((code = reserve(&lines->keys, size + 2))) return code;
            put_byte(&lines->keys, i ? ',' : '[');
            put(&lines->keys, is_null ? text : text - 1, size);
        }
        if ((code = reserve(&lines->keys, 2))) return code;
        if (!keys) put_byte(&lines->keys, '[');
        put_byte(&lines->keys, ']');
        end_row(&lines->keys, row, 1);
    }
    return DONE;
}

PyDoc_STRVAR(convert_lines_doc,
"convert_lines(data, from, to, names, name_at, key, asked) -> (keys, images, starts, ends) | None\n\n"
"Convert the lines of a COPY in `data`, each between `from` and `to`, with its line end (int64).\n"
"`names`: for each column its name as JSON and a colon, where `name_at` says (int32).\n"
"`key`, `asked`: numbers of columns (int32). `starts`, `ends`: of each value in the images, of the columns that are\n"
"asked for, row by row, within its quotes (int32); NULL is an empty piece before `null`.\n"
"None: a line is odd.");

static int are_columns(const int32_t *numbers, int64_t count, int64_t columns) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= columns) return 0;
    return 1;
}

static PyObject *convert_lines(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    static const size_t sizes[7] = {1, 8, 8, 1, 4, 4, 4};
    if (count != 7) return PyErr_Format(PyExc_TypeError, "convert_lines takes 7 arguments");
    Argument of[7] = {0};
    Lines lines = {0};
    PyObject *result = NULL;
    if (open_all(of, args, sizes, 7) < 0) goto end;
    const int64_t *from = of[1].view.buf, *to = of[2].view.buf;
    lines.rows = items(of + 1, 8);
    const Columns columns = {
        of[3].view.buf, of[4].view.buf, of[5].view.buf, of[6].view.buf,
        items(of + 4, 4) - 1, items(of + 5, 4), items(of + 6, 4),
    };
    const int32_t *name_at = columns.name_at;
    int is_whole = columns.count > 0 && name_at[0] == 0 && name_at[columns.count] <= of[3].view.len;
    is_whole = is_whole && items(of + 2, 8) == lines.rows;
    size_t total = 0;
    for (int64_t i = 0; is_whole && i < lines.rows; i++) {
        is_whole = from[i] >= 0 && from[i] <= to[i] && to[i] <= of[0].view.len;
        if (is_whole) total += (size_t)(to[i] - from[i]);
    }
    for (int64_t i = 0; is_whole && i < columns.count; i++) is_whole = name_at[i] <= name_at[i + 1];
    is_whole = is_whole && are_columns(columns.key, columns.keys, columns.count) &&
               are_columns(columns.asked, columns.asked_for, columns.count);
    if (!is_whole) {
        PyErr_SetString(PyExc_ValueError, "the arguments do not fit each other");
        goto end;
    }
    int code = DONE;
    size_t size;
    Py_BEGIN_ALLOW_THREADS
    lines.starts = malloc((size_t)columns.count * sizeof(int32_t));
    lines.ends = malloc((size_t)columns.count * sizeof(int32_t));
    if (lines.starts == NULL || lines.ends == NULL) code = NO_MEMORY;
    size = (size_t)lines.rows * (size_t)columns.asked_for * sizeof(int32_t);
    /* Names, commas and quotes are added to what is there. What is too much for an array will be found. */
    total += (size_t)lines.rows * ((size_t)name_at[columns.count] + 3 * (size_t)columns.count + 1) + 2048;
    for (int i = 0; i < 2; i++)
        if ((lines.places[i] = malloc(size + 1)) == NULL) code = NO_MEMORY;
    if (!code) code = column_begin(&lines.keys, lines.rows);
    if (!code) code = column_begin(&lines.images, lines.rows);
    if (!code && total <= INT32_MAX) code = reserve(&lines.images, total);
    if (!code) code = convert_copied(&lines, of[0].view.buf, from, to, &columns);
    Py_END_ALLOW_THREADS
    if (code == ODD) {
        result = Py_NewRef(Py_None);
        goto end;
    }
    if (code) {
        raised(code);
        goto end;
    }
    PyObject *of_keys = column_result(&lines.keys, lines.rows);
    PyObject *of_images = of_keys ? column_result(&lines.images, lines.rows) : NULL;
    PyObject *starts = of_images ? owned((void **)&lines.places[0], size) : NULL;
    PyObject *ends = starts ? owned((void **)&lines.places[1], size) : NULL;
    if (ends != NULL) result = PyTuple_Pack(4, of_keys, of_images, starts, ends);
    Py_XDECREF(of_keys);
    Py_XDECREF(of_images);
    Py_XDECREF(starts);
    Py_XDECREF(ends);
end:
    column_free(&lines.keys);
    column_free(&lines.images);
    free(lines.starts);
    free(lines.ends);
    for (int i = 0; i < 2; i++) free(lines.places[i]);
    close_all(of, 7);
    return result;
}

static PyMethodDef methods[] = {
    {"convert_changes", (PyCFunction)(void (*)(void))convert_changes, METH_FASTCALL, convert_changes_doc},
    {"convert_lines", (PyCFunction)(void (*)(void))convert_lines, METH_FASTCALL, convert_lines_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_rows", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_compiled_rows(void) { return PyModule_Create(&module); }
