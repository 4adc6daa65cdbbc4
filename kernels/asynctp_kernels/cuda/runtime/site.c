/* What a call costs the host while nothing has changed: see `edited` and `bound_calls`, which do the same in Python.

   Graph: an executable graph, and where its nodes have the addresses of a call's tensors. `launch` edits and launches.
   Call:  a place in a program that makes one call again and again. It looks at all that may have changed; only where
          all is as it was bound, and the plan has its graph, it makes the call. Else it calls `otherwise`, which is
          the same in Python for any case: a doubt here costs time, never a wrong call.
   land:  lets the current stream wait for a result that calls have left in flight: `moves.land`.

   The driver's functions are given as pointers. The GIL is released around those that enqueue, and held for all else. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#define MOST 64 /* tensors of a call */
#define MOST_FLYING 8 /* results in flight, before old ones are looked at */

typedef struct {
    int (*set_kernel)(void *executable, void *node, const void *params);
    int (*set_copy)(void *executable, void *node, const void *params, void *context);
    int (*replace_address)(void *descriptor, void *address);
    int (*launch)(void *executable, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*is_capturing)(void *stream, int *is);
    int (*current)(void **context);
} Driver;

/* The order of the calls of a device that no graph of the program's captures: `memory.Order`. */
typedef struct {
    uint64_t stream, capture, last, group, flown_capture, flown;
} Order;

/* --- a graph ----------------------------------------------------------------------------------------------------- */
/* `place` gets the address of tensor `number`, plus `offset`; it may be the address in a TMA descriptor. */
typedef struct {
    uint64_t *place, offset, number, described;
} Edit;

/* Copies have a context. A matmul of cuBLASLt, which is no node, has there whether it is made before the graph or after
   it. The node's edits are the next so many. */
typedef struct {
    void *node, *params, *context;
    uint64_t edits;
} Node;
enum { BEFORE = 1, AFTER };

/* Such a matmul: `cublaslt.Call`. */
typedef struct {
    int (*matmul)(void *handle, void *description, const void *one, uint64_t b, void *b_layout, uint64_t a,
                  void *a_layout, const void *zero, uint64_t c, void *c_layout, uint64_t out, void *out_layout,
                  const void *algorithm, void *workspace, size_t bytes, void *stream);
    int (*set_attribute)(void *description, int attribute, const void *value, size_t bytes);
    void *handle, *description, *one, *b_layout, *a_layout, *zero, *out_layout, *algorithm;
    uint64_t b, a, out, b_scale, a_scale, bias;
} Matmul;
/* cublasLtMatmulDescAttributes_t; the first operand there is B */
enum { BIAS_POINTER = 8, B_SCALE_POINTER = 17, A_SCALE_POINTER };

/* shown: the addresses that the nodes have now, if `known`. The buffers are Python's, which owns them. */
typedef struct {
    PyObject_HEAD
    void *executable;
    Py_buffer driver, nodes, edits;
    int known;
    Py_ssize_t tensors;
    uint64_t shown[MOST];
} Graph;

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    Graph *graph = (Graph *)type->tp_alloc(type, 0);
    unsigned long long executable;
    if (!graph) return NULL;
    if (!PyArg_ParseTuple(args, "y*Ky*y*n", &graph->driver, &executable, &graph->nodes, &graph->edits,
                          &graph->tensors)
        || graph->tensors > MOST) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "more tensors than a call can have here");
        Py_DECREF(graph);
        return NULL;
    }
    graph->executable = (void *)executable;
    return (PyObject *)graph;
}

static void graph_free(Graph *graph)
{
    PyTypeObject *type = Py_TYPE(graph);
    if (graph->driver.obj) PyBuffer_Release(&graph->driver);
    if (graph->nodes.obj) PyBuffer_Release(&graph->nodes);
    if (graph->edits.obj) PyBuffer_Release(&graph->edits);
    type->tp_free(graph);
    Py_DECREF(type);
}

/* Let later launches be of tensors at these addresses. Copies are always set: there may be other memory now.
   Gives the function that failed and its code, or NULL. Until `known` is set again, all is set at the next launch. */
static const char *edit(Graph *graph, const uint64_t *at, int *code)
{
    const Driver *driver = graph->driver.buf;
    const Edit *each = graph->edits.buf;
    const Node *node = graph->nodes.buf, *end = node + graph->nodes.len / sizeof(Node);
    int known = graph->known;
    graph->known = 0;
    for (; node < end; node++) {
        int changed = !known || node->context;
        for (const Edit *last = each + node->edits; each < last; each++) {
            if (known && !node->context && at[each->number] == graph->shown[each->number]) continue;
            changed = 1;
            if (!each->described) *each->place = at[each->number] + each->offset;
            else if ((*code = driver->replace_address(each->place, (void *)(at[each->number] + each->offset))))
                return "cuTensorMapReplaceAddress";
        }
        if (!changed || !node->node) continue;
        if (node->context) {
            if ((*code = driver->set_copy(graph->executable, node->node, node->params, node->context)))
                return "cuGraphExecMemcpyNodeSetParams";
        } else if ((*code = driver->set_kernel(graph->executable, node->node, node->params)))
            return "cuGraphExecKernelNodeSetParams_v2";
    }
    memcpy(graph->shown, at, sizeof(uint64_t) * graph->tensors);
    return NULL;
}

/* Make the matmuls of cuBLASLt before the graph, or after it. */
static const char *multiply(Graph *graph, uint64_t when, uint64_t stream, int *code)
{
    const Node *node = graph->nodes.buf, *end = node + graph->nodes.len / sizeof(Node);
    for (; node < end; node++) {
        if (node->node || (uint64_t)node->context != when) continue;
        const Matmul *each = node->params;
        if ((each->b_scale && (*code = each->set_attribute(each->description, B_SCALE_POINTER, &each->b_scale, 8)))
            || (each->a_scale && (*code = each->set_attribute(each->description, A_SCALE_POINTER, &each->a_scale, 8)))
            || (each->bias && (*code = each->set_attribute(each->description, BIAS_POINTER, &each->bias, 8))))
            return "cublasLtMatmulDescSetAttribute";
        if ((*code = each->matmul(each->handle, each->description, each->one, each->b, each->b_layout, each->a,
                                  each->a_layout, each->zero, each->out, each->out_layout, each->out, each->out_layout,
                                  each->algorithm, NULL, 0, (void *)stream)))
            return "cublasLtMatmul";
    }
    return NULL;
}

static const char *launch(Graph *graph, uint64_t stream, int *code)
{
    const Driver *driver = graph->driver.buf;
    const char *failed = multiply(graph, BEFORE, stream, code);
    if (failed) return failed;
    if ((*code = driver->launch(graph->executable, (void *)stream))) return "cuGraphLaunch";
    if ((failed = multiply(graph, AFTER, stream, code))) return failed;
    graph->known = 1;
    return NULL;
}

/* launch(stream, addresses) -> None, or (function, code, whether nothing was launched) */
static PyObject *graph_launch(PyObject *self, PyObject *args)
{
    Graph *graph = (Graph *)self;
    unsigned long long stream;
    PyObject *addresses;
    uint64_t at[MOST];
    if (!PyArg_ParseTuple(args, "KO!", &stream, &PyTuple_Type, &addresses)) return NULL;
    if (PyTuple_GET_SIZE(addresses) < graph->tensors) return PyErr_Format(PyExc_ValueError, "too few addresses");
    for (Py_ssize_t i = 0; i < graph->tensors; i++)
        at[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(addresses, i));
    if (PyErr_Occurred()) return NULL;
    const char *failed;
    int code = 0, edited;
    Py_BEGIN_ALLOW_THREADS
    edited = !(failed = edit(graph, at, &code));
    if (edited) failed = launch(graph, stream, &code);
    Py_END_ALLOW_THREADS
    if (failed) return Py_BuildValue("siO", failed, code, edited ? Py_False : Py_True);
    Py_RETURN_NONE;
}

/* --- a call ------------------------------------------------------------------------------------------------------ */
/* What a call is made with, and what is looked at first: the fields of a tuple (`BoundCall.in_c`). */
enum {
    OTHERWISE, FAILED,    /* the call in Python; what raises the error of a driver's function, of its name and code */
    MEMORY, GRAPH, GROUP, /* weak references: the group's memory, the plan's graph (`PlanGraph`), the group */
    RESOLVE, NAME,        /* what gives the group of this name */
    REQUESTS, ASKED,      /* the implementations that are asked for, and the last of these, or None, as bound */
    GENERATION, SKIPPED,  /* of the memory, as bound */
    STREAM, GPU,          /* what gives the current stream of the device of this index */
    OPERANDS,             /* which argument comes next in the order of addresses */
    MAKERS,               /* what makes the memory behind these; None stands for the tensor before, once more */
    RESULTS,              /* so many of what is made are returned; or one alone, -1 for the first */
    TENSORS,              /* how many addresses there are */
    TRY, RELEASE,         /* of the turn */
    COUNTS, COUNTED,      /* a dictionary of counts of calls, and the key there */
    IMPLEMENTATION,       /* its name */
    CONTEXT,              /* the device's */
    NUMBER, LAST,         /* of the memory, and the event of its last call's end */
    LANDED,               /* the event of gathers in flight, if calls come after these; 1: after all in flight; or 0 */
    FLIGHT,               /* numbers: `Flight`; of calls that the stream waits for none */
    FLIGHTS, FLYING,      /* what gives events of their ends; a dictionary of what is in flight, or None: waited for */
    DRIVER, ORDER,        /* buffers: `Driver` and `Order` */
    FIELDS
};

/* Streams that make copies and reduce, and events: where copies begin, the end of the last call in flight, and of the
   last gather among these, or 0. */
typedef struct {
    unsigned long long stream, reducer, start, flown, gathered;
} Flight;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *bound;
    Py_buffer driver, order;
    Py_ssize_t tensors, results;
    uint64_t context, number, last, landed;
    Flight flight;
} Call;

static PyObject *text_graph, *text_native, *text_generation, *text_skipped, *text_failure, *text_made,
    *text_launched, *text_implementation, *text_data_ptr, *text_holds, *text_forget, *text_get_device;
static PyTypeObject *graph_type;

static uint64_t number_at(PyObject *bound, int field)
{
    return PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(bound, field));
}

static PyObject *call_make(PyObject *self, PyObject *const *args, size_t flags, PyObject *names);

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    PyObject *bound;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &bound)) return NULL;
    if (PyTuple_GET_SIZE(bound) != FIELDS) return PyErr_Format(PyExc_ValueError, "a call has %d fields", FIELDS);
    Call *call = (Call *)type->tp_alloc(type, 0);
    if (!call) return NULL;
    Py_INCREF(bound);
    call->bound = bound;
    call->vectorcall = call_make;
    call->tensors = PyLong_AsSsize_t(PyTuple_GET_ITEM(bound, TENSORS));
    call->results = PyLong_AsSsize_t(PyTuple_GET_ITEM(bound, RESULTS));
    call->context = number_at(bound, CONTEXT);
    call->number = number_at(bound, NUMBER);
    call->last = number_at(bound, LAST);
    call->landed = number_at(bound, LANDED);
    Flight *flight = &call->flight;
    if (PyErr_Occurred()
        || !PyArg_ParseTuple(PyTuple_GET_ITEM(bound, FLIGHT), "|KKKKK", &flight->stream, &flight->reducer,
                             &flight->start, &flight->flown, &flight->gathered)
        || PyObject_GetBuffer(PyTuple_GET_ITEM(bound, ORDER), &call->order, PyBUF_WRITABLE)
        || PyObject_GetBuffer(PyTuple_GET_ITEM(bound, DRIVER), &call->driver, PyBUF_SIMPLE)) {
        Py_DECREF(call);
        return NULL;
    }
    return (PyObject *)call;
}

static void call_free(Call *call)
{
    PyTypeObject *type = Py_TYPE(call);
    if (call->order.obj) PyBuffer_Release(&call->order);
    if (call->driver.obj) PyBuffer_Release(&call->driver);
    Py_XDECREF(call->bound);
    type->tp_free(call);
    Py_DECREF(type);
}

/* 1 if so, 0 if not, or if it cannot be told (with an error). */
static int is(PyObject *found, PyObject *wanted)
{
    int same = found && (found == wanted || PyObject_RichCompareBool(found, wanted, Py_EQ) == 1);
    Py_XDECREF(found);
    return same;
}

/* The stream of a call, if none is being captured there, and the device is ours. */
static int stream_of(Call *call, PyObject *const *bound, uint64_t *stream)
{
    const Driver *driver = call->driver.buf;
    PyObject *found = PyObject_CallOneArg(bound[STREAM], bound[GPU]);
    void *context = NULL;
    int captures = 0;
    if (!found) return 0;
    *stream = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return !PyErr_Occurred() && !driver->current(&context) && (uint64_t)context == call->context
        && !driver->is_capturing((void *)*stream, &captures) && !captures;
}

/* The group of the name is that of before, and nothing else is asked for. */
static int is_as_bound(PyObject *const *bound)
{
    PyObject *requests = bound[REQUESTS];
    Py_ssize_t count = PyList_GET_SIZE(requests);
    PyObject *asked = count ? PyList_GET_ITEM(requests, count - 1) : Py_None;
    if (asked != bound[ASKED]) return 0;
    PyObject *group = PyObject_CallNoArgs(bound[GROUP]);
    if (!group) return 0;
    PyObject *found = group == Py_None ? NULL : PyObject_CallOneArg(bound[RESOLVE], bound[NAME]);
    int same = found == group;
    Py_DECREF(group);
    Py_XDECREF(found);
    return same;
}

/* Append the addresses of a tensor, of a list of them, or of None. */
static int append(PyObject *value, uint64_t *at, Py_ssize_t *count)
{
    if (value == Py_None) return 1;
    if (PyList_Check(value) || PyTuple_Check(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
            if (!append(PySequence_Fast_GET_ITEM(value, i), at, count)) return 0;
        return 1;
    }
    PyObject *address = *count < MOST ? PyObject_CallMethodNoArgs(value, text_data_ptr) : NULL;
    if (!address) return 0;
    at[(*count)++] = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    return !PyErr_Occurred();
}

/* The results, and other memory that the call makes; a maker that is None stands for the one before. */
static PyObject *made_anew(PyObject *makers, uint64_t *at, Py_ssize_t *count)
{
    Py_ssize_t size = PyTuple_GET_SIZE(makers);
    PyObject *made = PyList_New(size);
    for (Py_ssize_t i = 0; made && i < size; i++) {
        PyObject *maker = PyTuple_GET_ITEM(makers, i);
        PyObject *one = maker == Py_None && i ? Py_NewRef(PyList_GET_ITEM(made, i - 1)) : PyObject_CallNoArgs(maker);
        if (one) PyList_SET_ITEM(made, i, one);
        if (!one || !append(one, at, count)) Py_CLEAR(made);
    }
    return made;
}

/* One more than a number, which may be missing. */
static PyObject *one_more(PyObject *number)
{
    PyObject *one = PyLong_FromLong(1), *sum = one && number ? PyNumber_Add(number, one) : Py_XNewRef(one);
    Py_XDECREF(one);
    return sum;
}

/* object.name += 1 */
static void count_one(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(object, name), *more = one_more(found);
    if (more) PyObject_SetAttr(object, name, more);
    Py_XDECREF(found);
    Py_XDECREF(more);
}

/* What is counted and kept of a call that is made. */
static void note(PyObject *const *bound, PyObject *memory)
{
    PyObject *count = one_more(PyDict_GetItemWithError(bound[COUNTS], bound[COUNTED]));
    if (count) PyDict_SetItem(bound[COUNTS], bound[COUNTED], count);
    Py_XDECREF(count);
    count_one(memory, text_made);
    count_one(memory, text_launched);
    PyObject_SetAttr(memory, text_implementation, bound[IMPLEMENTATION]);
}

static const char *record(const Driver *driver, uint64_t event, uint64_t stream, int *code)
{
    return (*code = driver->record((void *)event, (void *)stream)) ? "cuEventRecord" : NULL;
}

static const char *await(const Driver *driver, uint64_t stream, uint64_t event, int *code)
{
    return (*code = driver->wait((void *)stream, (void *)event, 0)) ? "cuStreamWaitEvent" : NULL;
}

/* Leave what the copy stream has been given in flight until the event `done`, as `GroupMemory.in_flight` does. */
static const char *leave(Call *call, uint64_t done, int *code)
{
    const Driver *driver = call->driver.buf;
    const Flight *flight = &call->flight;
    Order *order = call->order.buf;
    const char *failed = record(driver, done, flight->stream, code);
    if (!failed) failed = record(driver, flight->flown, flight->stream, code);
    if (!failed) failed = await(driver, flight->reducer, done, code);
    if (!failed && flight->gathered) failed = record(driver, flight->gathered, flight->stream, code);
    order->group = call->number, order->flown_capture = 0, order->flown = done;
    return failed;
}

/* Enqueue the call in its turn, as `GroupMemory.call` does, or `fly`: after the device's last one, and what is in
   flight. done: the event of the end of a call in flight; else 0. */
static const char *enqueue(Call *call, Graph *graph, uint64_t stream, const uint64_t *at, uint64_t done, int *code,
                           int *edited)
{
    const Driver *driver = call->driver.buf;
    Order *order = call->order.buf;
    const char *failed = edit(graph, at, code);
    if (failed) return failed;
    *edited = 1;
    int own = order->group == call->number, lands = call->landed == 1;
    uint64_t on = done ? call->flight.stream : stream;
    if (order->flown && (!own || lands)) failed = await(driver, stream, order->flown, code);
    if (!failed && order->last && order->stream != stream) failed = await(driver, stream, order->last, code);
    if (!failed && call->landed > 1 && order->flown) failed = await(driver, stream, call->landed, code);
    order->stream = stream, order->last = call->last;
    if (!failed && done) failed = record(driver, call->flight.start, stream, code);
    if (!failed && done) failed = await(driver, on, call->flight.start, code);
    if (!failed) failed = launch(graph, on, code);
    if (!failed && done) failed = leave(call, done, code);
    return failed ? failed : record(driver, call->last, stream, code);
}

/* With the turn: whether the memory can be used still, and the graph, with what keeps it; or NULL. */
static Graph *graph_of(PyObject *const *bound, PyObject *memory, PyObject *plan_graph, PyObject **keeper)
{
    if (!is(PyObject_GetAttr(memory, text_failure), Py_None)
        || !is(PyObject_GetAttr(memory, text_skipped), bound[SKIPPED])
        || !is(PyObject_GetAttr(memory, text_generation), bound[GENERATION]))
        return NULL;
    *keeper = PyObject_GetAttr(plan_graph, text_graph);
    if (!*keeper || *keeper == Py_None) return NULL;
    PyObject *native = PyObject_GetAttr(*keeper, text_native);
    Py_XDECREF(native); /* the keeper has it */
    return native && Py_IS_TYPE(native, graph_type) ? (Graph *)native : NULL;
}

/* Make the call in its turn, if nobody else has that. NOT_MADE: nothing is enqueued; FAILED_HALF_WAY: with an error.
   done: gets the event of its end, if the call is left in flight. */
enum { NOT_MADE, MADE, FAILED_HALF_WAY };

static int make(Call *call, PyObject *memory, PyObject *plan_graph, uint64_t stream, const uint64_t *at,
                PyObject **done)
{
    PyObject *const *bound = &PyTuple_GET_ITEM(call->bound, 0);
    PyObject *keeper = NULL, *turn = PyObject_CallOneArg(bound[TRY], Py_False);
    const char *failed = NULL;
    int code = 0, edited = 0, outcome = NOT_MADE;
    if (turn != Py_True) {
        Py_XDECREF(turn);
        return NOT_MADE;
    }
    Graph *graph = graph_of(bound, memory, plan_graph, &keeper);
    uint64_t event = 0;
    if (graph && call->flight.stream && (*done = PyIter_Next(bound[FLIGHTS]))) event = PyLong_AsUnsignedLongLong(*done);
    if (graph && graph->tensors <= call->tensors && !call->flight.stream == !event) {
        Py_BEGIN_ALLOW_THREADS
        failed = enqueue(call, graph, stream, at, event, &code, &edited);
        if (!failed && event && bound[FLYING] == Py_None) failed = await(call->driver.buf, stream, event, &code);
        Py_END_ALLOW_THREADS
        outcome = !failed ? MADE : edited ? FAILED_HALF_WAY : NOT_MADE;
    }
    if (outcome == MADE) note(bound, memory);
    PyErr_Clear();
    PyObject *released = PyObject_CallNoArgs(bound[RELEASE]);
    if (outcome == FAILED_HALF_WAY) Py_XDECREF(PyObject_CallFunction(bound[FAILED], "si", failed, code)); /* raises */
    Py_XDECREF(released);
    Py_XDECREF(keeper);
    Py_DECREF(turn);
    return outcome;
}

/* Keep what is in flight, as `moves.flying` has it; 0 with an error. */
static int fly(PyObject *flying, uint64_t address, PyObject *result, PyObject *source, uint64_t stream, PyObject *done)
{
    PyObject *key = PyLong_FromUnsignedLongLong(address);
    PyObject *bulk = Py_BuildValue("OOKO", result, source, (unsigned long long)stream, done);
    int failed = !key || !bulk || PyDict_SetItem(flying, key, bulk);
    PyObject *done_with = failed || PyDict_GET_SIZE(flying) <= MOST_FLYING
                              ? NULL : PyObject_CallMethodNoArgs(flying, text_forget);
    Py_XDECREF(done_with);
    Py_XDECREF(key);
    Py_XDECREF(bulk);
    return !PyErr_Occurred();
}

/* Make the call if all is as bound. Gives its results; NULL without an error where `otherwise` has to make it. */
static PyObject *call_directly(Call *call, PyObject *const *args, Py_ssize_t given)
{
    PyObject *const *bound = &PyTuple_GET_ITEM(call->bound, 0);
    PyObject *made = NULL, *memory = NULL, *plan_graph = NULL, *results = NULL, *done = NULL;
    PyObject *operands = bound[OPERANDS];
    uint64_t at[MOST], bits = 0, stream;
    Py_ssize_t count = 0;
    int outcome = NOT_MADE;
    if (!stream_of(call, bound, &stream) || !is_as_bound(bound)) goto out;
    if (!(memory = PyObject_CallNoArgs(bound[MEMORY])) || memory == Py_None) goto out;
    if (!(plan_graph = PyObject_CallNoArgs(bound[GRAPH])) || plan_graph == Py_None) goto out;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(operands); i++) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(operands, i));
        if (place < given && !append(args[place], at, &count)) goto out;
    }
    if (!(made = made_anew(bound[MAKERS], at, &count)) || count != call->tensors) goto out;
    for (Py_ssize_t i = 0; i < count; i++) bits |= at[i];
    if (bits & 15) goto out; /* operands are copied first */
    outcome = make(call, memory, plan_graph, stream, at, &done);
    if (outcome == MADE && done && bound[FLYING] != Py_None
        && !fly(bound[FLYING], at[count - 1], PyList_GET_ITEM(made, 0), args[0], stream, done))
        goto out;
    if (outcome == MADE && call->results < 0) results = Py_NewRef(PyList_GET_ITEM(made, -1 - call->results));
    else if (outcome == MADE && !PyList_SetSlice(made, call->results, PyList_GET_SIZE(made), NULL))
        results = Py_NewRef(made);
out:
    if (outcome == NOT_MADE) PyErr_Clear();
    Py_XDECREF(made);
    Py_XDECREF(memory);
    Py_XDECREF(plan_graph);
    Py_XDECREF(done);
    return results;
}

static PyObject *call_make(PyObject *self, PyObject *const *args, size_t flags, PyObject *names)
{
    Call *call = (Call *)self;
    PyObject *results = names ? NULL : call_directly(call, args, PyVectorcall_NARGS(flags));
    if (results || PyErr_Occurred()) return results;
    flags &= ~PY_VECTORCALL_ARGUMENTS_OFFSET;
    return PyObject_Vectorcall(PyTuple_GET_ITEM(call->bound, OTHERWISE), args, flags, names);
}

static PyObject *call_holds(PyObject *self, PyObject *unused)
{
    return PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(((Call *)self)->bound, OTHERWISE), text_holds);
}

/* --- a wait ------------------------------------------------------------------------------------------------------ */
/* What waits are made with: the fields of a tuple (`moves.bound_land`). */
enum {
    IN_FLIGHT, FUNCTIONS, /* a dictionary (`moves.flying`), a buffer: `Driver` */
    CURRENT,              /* what gives the current stream of the device of an index */
    USED,                 /* what tells the allocator that a tensor is used on the current stream */
    RAISE                 /* what raises the error of a driver's function: `edited.raise_failed` */
};

/* Wait for what is in flight, which nothing holds any more but this: 0 with an error. */
static int land_bulk(PyObject *const *with, PyObject *bulk)
{
    PyObject *result, *source, *device = NULL, *found = NULL, *used = NULL;
    unsigned long long its_stream, done;
    Py_buffer driver;
    int code = 0;
    if (!PyArg_ParseTuple(bulk, "OOKK", &result, &source, &its_stream, &done)
        || !(device = PyObject_CallMethodNoArgs(source, text_get_device))
        || !(found = PyObject_CallOneArg(with[CURRENT], device))
        || PyObject_GetBuffer(with[FUNCTIONS], &driver, PyBUF_SIMPLE))
        goto out;
    uint64_t stream = PyLong_AsUnsignedLongLong(found);
    const char *failed;
    Py_BEGIN_ALLOW_THREADS
    failed = await(driver.buf, stream, done, &code);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&driver);
    if (failed) used = PyObject_CallFunction(with[RAISE], "siO", failed, code, Py_False); /* raises */
    else if (stream != its_stream) used = PyObject_CallOneArg(with[USED], source);
out:
    Py_XDECREF(device);
    Py_XDECREF(found);
    Py_XDECREF(used);
    return !PyErr_Occurred();
}

/* land(result) -> whether it was in flight */
static PyObject *land(PyObject *fields, PyObject *result)
{
    PyObject *const *with = &PyTuple_GET_ITEM(fields, 0);
    PyObject *address = PyObject_CallMethodNoArgs(result, text_data_ptr);
    PyObject *bulk = address ? Py_XNewRef(PyDict_GetItemWithError(with[IN_FLIGHT], address)) : NULL;
    if (bulk && !PyDict_DelItem(with[IN_FLIGHT], address)) land_bulk(with, bulk);
    PyObject *landed = PyErr_Occurred() ? NULL : Py_NewRef(bulk ? Py_True : Py_False);
    Py_XDECREF(address);
    Py_XDECREF(bulk);
    return landed;
}

static PyMethodDef land_function = {"land", land, METH_O, NULL};

/* bound_land(fields) -> land */
static PyObject *bound_land(PyObject *self, PyObject *fields)
{
    if (!PyTuple_CheckExact(fields) || PyTuple_GET_SIZE(fields) != RAISE + 1)
        return PyErr_Format(PyExc_ValueError, "a wait has %d fields", RAISE + 1);
    return PyCFunction_New(&land_function, fields);
}

/* --- the module -------------------------------------------------------------------------------------------------- */
static PyMethodDef graph_methods[] = {{"launch", graph_launch, METH_VARARGS, NULL}, {NULL}};
static PyType_Slot graph_slots[] = {
    {Py_tp_new, graph_new}, {Py_tp_dealloc, graph_free}, {Py_tp_methods, graph_methods}, {0, NULL}};
static PyType_Spec graph_spec = {"asynctp_site.Graph", sizeof(Graph), 0, Py_TPFLAGS_DEFAULT, graph_slots};

static PyMethodDef call_methods[] = {{"holds", call_holds, METH_NOARGS, NULL}, {NULL}};
static PyMemberDef call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, NULL}, {NULL}};
static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new}, {Py_tp_dealloc, call_free}, {Py_tp_methods, call_methods}, {Py_tp_members, call_members},
    {Py_tp_call, PyVectorcall_Call}, {0, NULL}};
static PyType_Spec call_spec = {
    "asynctp_site.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, call_slots};

static PyMethodDef functions[] = {{"bound_land", bound_land, METH_O, NULL}, {NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "asynctp_site", NULL, -1, functions};

PyMODINIT_FUNC PyInit_asynctp_site(void)
{
    struct { PyObject **text; const char *value; } texts[] = {
        {&text_graph, "graph"}, {&text_native, "native"}, {&text_generation, "generation"}, {&text_skipped, "skipped"},
        {&text_failure, "failure"}, {&text_made, "made"}, {&text_launched, "launched"},
        {&text_implementation, "last_implementation"}, {&text_data_ptr, "data_ptr"}, {&text_holds, "holds"},
        {&text_forget, "forget"}, {&text_get_device, "get_device"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].text = PyUnicode_InternFromString(texts[i].value))) return NULL;
    PyObject *module = PyModule_Create(&definition), *call = PyType_FromSpec(&call_spec);
    graph_type = (PyTypeObject *)PyType_FromSpec(&graph_spec);
    if (!module || !call || !graph_type || PyModule_AddObject(module, "Graph", Py_NewRef((PyObject *)graph_type))
        || PyModule_AddObject(module, "Call", call))
        return NULL;
    return module;
}
