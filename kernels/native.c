/* The operations of a decoder layer on a CPU, fp32, as Python calls them: one by one, or a stack of layers at once.
 *
 * Threads are those of the calling thread's OpenMP; a call is one parallel region. A layer does the same to the same
 * numbers either way, so both ways give the same bits.
 */
#include "native.h"

#define SPINS 1000 /* looks (25 us) before a thread sleeps: longer than most pieces, short beside a time slice */

/* --- teams -------------------------------------------------------------------------------------------------------- */

void form(Team *team)
{
    memset(team, 0, sizeof *team);
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->moved, 0);
}

void disband(Team *team)
{
    pthread_cond_destroy(&team->moved);
    pthread_mutex_destroy(&team->lock);
}

INLINE void breathe(void)
{
#if defined(__x86_64__)
    _mm_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static int is_over(Worker *worker) { return atomic_load(&worker->team->front) >> 32 != worker->stage; }

static void finish(Worker *worker, long total)
{
    Team *team = worker->team;
    long held = worker->held;
    worker->held = 0;
    if (!held || atomic_fetch_add(&team->done, held) + held < total)
        return;
    atomic_store(&team->done, 0);
    atomic_store(&team->front, (worker->stage + 1) << 32);
    if (atomic_load(&team->sleepers)) {
        pthread_mutex_lock(&team->lock);
        pthread_cond_broadcast(&team->moved);
        pthread_mutex_unlock(&team->lock);
    }
}

static void wait_for_others(Worker *worker)
{
    Team *team = worker->team;
    for (int i = 0; i < SPINS; i++) {
        if (is_over(worker))
            return;
        breathe();
    }
    pthread_mutex_lock(&team->lock);
    atomic_fetch_add(&team->sleepers, 1);
    while (!is_over(worker))
        pthread_cond_wait(&team->moved, &team->lock);
    atomic_fetch_sub(&team->sleepers, 1);
    pthread_mutex_unlock(&team->lock);
}

long next(Worker *worker, long total, long step)
{
    finish(worker, total);
    unsigned long front = atomic_load(&worker->team->front);
    while (front >> 32 == worker->stage) {
        long first = front & 0xffffffff;
        if (first >= total) {
            wait_for_others(worker);
            break;
        }
        worker->held = total - first < step ? total - first : step;
        if (atomic_compare_exchange_weak(&worker->team->front, &front, front + worker->held))
            return first;
        worker->held = 0;
    }
    worker->stage++;
    return -1;
}

/* --- one by one --------------------------------------------------------------------------------------------------- */

int ew_has_codes(void)
{
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

void ew_product(const Product *p)
{
    if (!p->rows)
        return;
    Team team;
    form(&team);
#pragma omp parallel
    multiply(&(Worker){.team = &team}, p);
    disband(&team);
}

void ew_norm(const float *x, const float *weight, float eps, long rows, long n, float *out)
{
#pragma omp parallel for schedule(static) if (rows * n > 32768)
    for (long r = 0; r < rows; r++)
        norm_row(x + r * n, weight, eps, n, out + r * n);
}

/* both [rows, 2 n]: gate, then up -> out [rows, n]; n a multiple of 16. */
void ew_gate(const float *both, long rows, long n, float *out)
{
#pragma omp parallel for schedule(static) if (rows * n > 16384)
    for (long r = 0; r < rows; r++) {
        const float *gate = both + 2 * r * n, *up = gate + n;
        for (long i = 0; i < n; i += LANES) {
            vf g = load(gate + i);
            store(out + r * n + i, g / (1.0f + exp_of(-g)) * load(up + i));
        }
    }
}

/* Per row of x [rows][n]: the first of its largest elements, and whether all are finite. */
void ew_largest(const float *x, long rows, long n, int64_t *at, unsigned char *finite)
{
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (long r = 0; r < rows; r++, x += n) {
        vf most = all(-INFINITY), wrong = all(0);
        vi where = lanes, here = lanes;
        long whole = n / LANES * LANES;
        for (long i = 0; i < whole; i += LANES, here += LANES) {
            vf v = load(x + i);
            vi more = v > most;
            most = either(more, v, most);
            where = (more & here) | (~more & where);
            wrong += v * 0.0f;
        }
        float largest = most[0], bad = total(wrong);
        long best = where[0];
        for (int i = 1; i < LANES; i++)
            if (most[i] > largest || (most[i] == largest && where[i] < best))
                largest = most[i], best = where[i];
        for (long i = whole; i < n; i++) {
            if (x[i] > largest)
                largest = x[i], best = i;
            bad += x[i] * 0.0f;
        }
        at[r] = best;
        finite[r] = bad == 0;
    }
}

void ew_attention(const Shape *shape, const Plan *plan, const float *q_norm, const float *k_norm, float *qkv, float *k,
                  float *v, float *out)
{
    Team team;
    form(&team);
#pragma omp parallel
    {
        Worker worker = {.team = &team};
        place(&worker, shape, plan, q_norm, k_norm, qkv, k, v);
        attend(&worker, shape, plan, qkv, k, v, out);
    }
    disband(&team);
}

/* --- a stack of layers -------------------------------------------------------------------------------------------- */

typedef struct {
    const float *input_norm, *post_norm, *q_norm, *k_norm, *qkv_bias;
    Matrix qkv, o, gate_up, down;
    float *k, *v;
} Layer;

/* Rows of a step, and room for what its layers hand on. */
typedef struct {
    float *h;            /* [tokens][hidden], the residual stream; overwritten */
    float *qkv;          /* [tokens][heads + 2 kv_heads][dim] */
    float *mixed;        /* [tokens][heads][dim] */
    float *gated;        /* [tokens][intermediate] */
    float *scratch;      /* 2 * tokens * the longest input of a product */
    const int64_t *rows; /* [num_rows]: after the last layer's attention only these go on; all where out is h */
    long num_rows;
    float *out; /* [num_rows][hidden] of those */
    int quantizes;
} Rows;

static void pick(Worker *worker, const float *from, long n, const Rows *rows, float *to)
{
    EACH(r, worker, rows->num_rows)
        memcpy(to + r * n, from + rows->rows[r] * n, n * sizeof(float));
}

static void pass(Worker *worker, const Layer *l, const Shape *shape, const Plan *plan, const Rows *rows, int last)
{
    long count = plan->tokens;
    float *h = rows->h, *mixed = rows->mixed;
    Product base = {.scratch = rows->scratch, .eps = shape->eps, .quantizes = rows->quantizes, .rows = count};

    Product qkv = base;
    qkv.w = &l->qkv, qkv.x = h, qkv.norm = l->input_norm, qkv.bias = l->qkv_bias, qkv.y = rows->qkv;
    multiply(worker, &qkv);
    place(worker, shape, plan, l->q_norm, l->k_norm, rows->qkv, l->k, l->v);
    attend(worker, shape, plan, rows->qkv, l->k, l->v, mixed);
    if (last && rows->out != rows->h) {
        if (!rows->num_rows)
            return;
        pick(worker, h, l->qkv.in, rows, rows->out);
        pick(worker, mixed, l->o.in, rows, rows->qkv); /* whose content was used up */
        h = rows->out, mixed = rows->qkv, base.rows = rows->num_rows;
    }
    Product o = base, gate_up = base, down = base;
    o.w = &l->o, o.x = mixed, o.residual = h, o.y = h;
    multiply(worker, &o);
    gate_up.w = &l->gate_up, gate_up.x = h, gate_up.norm = l->post_norm, gate_up.gated = 1, gate_up.y = rows->gated;
    multiply(worker, &gate_up);
    down.w = &l->down, down.x = rows->gated, down.residual = h, down.y = h;
    multiply(worker, &down);
}

void ew_layers(const Layer *layers, long count, const Shape *shape, const Plan *plan, const Rows *rows)
{
    Team team;
    form(&team);
#pragma omp parallel
    {
        Worker worker = {.team = &team};
        for (long i = 0; i < count; i++)
            pass(&worker, layers + i, shape, plan, rows, i == count - 1);
    }
    disband(&team);
}
