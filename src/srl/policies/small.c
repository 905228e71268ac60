/* The arithmetic of a small actor-critic: acting, and whole passes of PPO with Adam (ADR 13).
 *
 * Two layers of 64 units and 256 samples are so little work that calling numpy or torch a hundred times costs more than
 * the products themselves. Here a pass over a batch is one call: samples are gathered from the slab, and network, loss,
 * gradient and step are done minibatch by minibatch, on the memory of the torch weights. Several threads divide the rows
 * of every minibatch; each writes its own gradient, and the sum of these is made in the same order every time, so that a
 * result depends on the number of threads but never on their timing.
 *
 * Actor and critic are two networks of the same shape ("twins"): every hidden layer has weights [2][inputs][outputs] and
 * biases [2][outputs]; the heads have weights [outputs][inputs]. All arrays are rows after rows. The structures are
 * repeated in small.py.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DEEPEST 8
#define METRICS 6

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int64_t depth, inputs, actions, gaussian, start;
    int64_t width[DEEPEST], tanh[DEEPEST];
    float *weight[DEEPEST], *bias[DEEPEST];
    float *actor, *actor_bias, *critic, *critic_bias, *log_std;
    const float *mean, *std; /* of observations, or NULL */
    float limit;
} Network;

typedef struct {
    float *flat, *grad, *moments, *squares, *steps; /* all weights, their gradients and moments; steps done so far */
    int64_t size, threads, normalize;
    float lr, eps, clip, value_clip, value_coef, bonus, longest;
} Learning;

typedef struct {
    const float *obs;
    const void *action;
    const float *log_prob;
    const int64_t *obs_at, *action_at, *at; /* where a row's sample is: NULL, at the row itself */
    const float *advantage, *returns, *old;
    const int64_t *rows;
    int64_t count, minibatch;
} Samples;

/* ---- products ---- */

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));

/* rows x (8 * vectors) of C = bias + A B; A's element (r, k) is A[r * ar + k * ac]. */
INLINE void tile(const int rows, const int vectors, int64_t inner, const float *A, int64_t ar, int64_t ac, const float *B,
                 int64_t ldb, float *C, int64_t ldc, const float *bias) {
    v8 sum[4][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = bias ? *(const v8 *)(bias + 8 * v) : (v8){0};
    for (int64_t k = 0; k < inner; k++)
        for (int v = 0; v < vectors; v++) {
            const v8 b = *(const v8 *)(B + k * ldb + 8 * v);
            for (int r = 0; r < rows; r++) sum[r][v] += A[r * ar + k * ac] * b;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(v8 *)(C + r * ldc + 8 * v) = sum[r][v];
}

/* C [m][n] = bias [n] + A B [inner][n]. */
INLINE void product(int64_t m, int64_t n, int64_t inner, const float *A, int64_t ar, int64_t ac, const float *B,
                    int64_t ldb, float *C, int64_t ldc, const float *bias) {
    int64_t j = 0;
    for (; j + 16 <= n; j += 16) {
        int64_t i = 0;
        const float *b = bias ? bias + j : 0;
        for (; i + 4 <= m; i += 4) tile(4, 2, inner, A + i * ar, ar, ac, B + j, ldb, C + i * ldc + j, ldc, b);
        for (; i < m; i++) tile(1, 2, inner, A + i * ar, ar, ac, B + j, ldb, C + i * ldc + j, ldc, b);
    }
    for (; j + 8 <= n; j += 8) {
        int64_t i = 0;
        const float *b = bias ? bias + j : 0;
        for (; i + 4 <= m; i += 4) tile(4, 1, inner, A + i * ar, ar, ac, B + j, ldb, C + i * ldc + j, ldc, b);
        for (; i < m; i++) tile(1, 1, inner, A + i * ar, ar, ac, B + j, ldb, C + i * ldc + j, ldc, b);
    }
    for (; j < n; j++)
        for (int64_t i = 0; i < m; i++) {
            float sum = bias ? bias[j] : 0;
            for (int64_t k = 0; k < inner; k++) sum += A[i * ar + k * ac] * B[k * ldb + j];
            C[i * ldc + j] = sum;
        }
}

INLINE float dot(int64_t n, const float *a, const float *b) {
    v8 part = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) part += *(const v8 *)(a + i) * *(const v8 *)(b + i);
    float sum = 0;
    for (int k = 0; k < 8; k++) sum += part[k];
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Sums over the rows of a [rows][n]. */
INLINE void columns(int64_t rows, int64_t n, const float *a, float *sum) {
    memset(sum, 0, n * sizeof *sum);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < n; j++) sum[j] += a[r * n + j];
}

/* tanh x = 1 - 2 / (exp(2 x) + 1), right to 2e-7. */
INLINE v8 tanh8(v8 x) {
    const v8 one = (v8){0} + 1.0f, top = (v8){0} + 9.0f;
    v8i high = x > top, low = x < -top;
    x = (v8)(((v8i)top & high) | ((v8i)(-top) & low) | ((v8i)x & ~(high | low)));
    const v8 power = x * 2.8853900817779268f, magic = (v8){0} + 12582912.0f; /* 1.5 * 2^23: what is added is rounded */
    const v8 rounded = power + magic;
    const v8 f = (power - (rounded - magic)) * 0.69314718055994531f;
    v8 e = f * (1 / 720.0f) + (1 / 120.0f);
    e = e * f + (1 / 24.0f);
    e = e * f + (1 / 6.0f);
    e = e * f + 0.5f;
    e = e * f + 1.0f;
    e = e * f + 1.0f;
    e = (v8)((v8i)e + (((v8i)rounded - (v8i)magic) << 23));
    return one - 2.0f / (e + one);
}

INLINE void activate(int64_t n, float *x, int is_tanh) {
    int64_t i = 0;
    if (!is_tanh) {
        for (; i < n; i++) x[i] = x[i] > 0 ? x[i] : 0;
        return;
    }
    for (; i + 8 <= n; i += 8) *(v8 *)(x + i) = tanh8(*(v8 *)(x + i));
    if (i < n) {
        v8 rest = {0};
        memcpy(&rest, x + i, (n - i) * sizeof *x);
        rest = tanh8(rest);
        memcpy(x + i, &rest, (n - i) * sizeof *x);
    }
}

/* ---- the network ---- */

/* The widest hidden layer. */
static int64_t widest(const Network *net) {
    int64_t most = 0;
    for (int64_t l = 0; l < net->depth; l++) most = net->width[l] > most ? net->width[l] : most;
    return most;
}

static int64_t all_widths(const Network *net) {
    int64_t sum = 0;
    for (int64_t l = 0; l < net->depth; l++) sum += net->width[l];
    return sum;
}

/* What one thread works in. */
typedef struct {
    float *x, *out[2][DEEPEST], *slope[2], *turned, *params, *value;
} Room;

/* Numbers in a room for so many rows. */
static size_t room_size(const Network *net, int64_t rows) {
    const int64_t most = widest(net);
    return rows * (net->inputs + 2 * all_widths(net) + 2 * most + net->actions + 1) + most * most + 64;
}

static void lay_out(Room *room, const Network *net, int64_t rows, float *memory) {
    const int64_t most = widest(net);
    room->x = memory;
    memory += rows * net->inputs;
    for (int twin = 0; twin < 2; twin++)
        for (int64_t l = 0; l < net->depth; l++) {
            room->out[twin][l] = memory;
            memory += rows * net->width[l];
        }
    for (int side = 0; side < 2; side++, memory += rows * most) room->slope[side] = memory;
    room->params = memory;
    memory += rows * net->actions;
    room->value = memory;
    memory += rows;
    room->turned = memory;
}

INLINE void look(const Network *net, const float *obs, float *x) {
    if (!net->mean) {
        memcpy(x, obs, net->inputs * sizeof *x);
        return;
    }
    for (int64_t i = 0; i < net->inputs; i++) {
        float y = (obs[i] - net->mean[i]) / net->std[i];
        y = y > net->limit ? net->limit : y;
        x[i] = y < -net->limit ? -net->limit : y;
    }
}

/* From room->x to all activations, the actor's logits or means, and values. */
INLINE void forward(const Network *net, Room *room, int64_t rows) {
    for (int twin = 0; twin < 2; twin++) {
        const float *x = room->x;
        int64_t inputs = net->inputs;
        for (int64_t l = 0; l < net->depth; l++) {
            const int64_t width = net->width[l];
            const float *weight = net->weight[l] + twin * inputs * width;
            product(rows, width, inputs, x, inputs, 1, weight, width, room->out[twin][l], width,
                    net->bias[l] + twin * width);
            activate(rows * width, room->out[twin][l], net->tanh[l]);
            x = room->out[twin][l], inputs = width;
        }
        for (int64_t r = 0; r < rows; r++)
            if (twin)
                room->value[r] = dot(inputs, x + r * inputs, net->critic) + net->critic_bias[0];
            else
                for (int64_t a = 0; a < net->actions; a++)
                    room->params[r * net->actions + a] =
                        dot(inputs, x + r * inputs, net->actor + a * inputs) + net->actor_bias[a];
    }
}

INLINE void log_softmax(int64_t n, float *x) {
    float top = x[0], sum = 0;
    for (int64_t a = 1; a < n; a++) top = x[a] > top ? x[a] : top;
    for (int64_t a = 0; a < n; a++) sum += expf(x[a] - top);
    top += logf(sum);
    for (int64_t a = 0; a < n; a++) x[a] -= top;
}

static float spread(const Network *net) {
    float sum = 0;
    for (int64_t a = 0; a < net->actions; a++) sum += net->log_std[a];
    return sum;
}

#define HALF_LOG_2PI 0.91893853320467274f

/* ---- acting ---- */

/* Actions of `rows` rows, their log-probabilities, and values times `scale` plus `shift`. `noise` is exponential for a
 * choice and normal otherwise; without it the likeliest actions are taken. 1 if there is no memory. */
FAST int small_act(const Network *net, const float *obs, int64_t rows, const float *noise, float scale, float shift,
                   void *actions, float *log_prob, float *value) {
    Room room;
    float *memory = malloc(room_size(net, rows) * sizeof *memory);
    if (!memory) return 1;
    lay_out(&room, net, rows, memory);
    for (int64_t r = 0; r < rows; r++) look(net, obs + r * net->inputs, room.x + r * net->inputs);
    forward(net, &room, rows);
    const float sure = net->gaussian ? spread(net) + net->actions * HALF_LOG_2PI : 0;
    for (int64_t r = 0; r < rows; r++) {
        float *params = room.params + r * net->actions;
        const float *luck = noise ? noise + r * net->actions : 0;
        value[r] = room.value[r] * scale + shift;
        if (net->gaussian) {
            float squares = 0;
            for (int64_t a = 0; a < net->actions; a++) {
                const float z = luck ? luck[a] : 0;
                ((float *)actions)[r * net->actions + a] = params[a] + expf(net->log_std[a]) * z;
                squares += z * z;
            }
            log_prob[r] = -0.5f * squares - sure;
        } else {
            int64_t best = 0;
            float most = -INFINITY;
            log_softmax(net->actions, params);
            for (int64_t a = 0; a < net->actions; a++) {
                const float score = luck ? expf(params[a]) / luck[a] : params[a];
                if (score > most) most = score, best = a;
            }
            ((int64_t *)actions)[r] = best + net->start;
            log_prob[r] = params[best];
        }
    }
    free(memory);
    return 0;
}

/* ---- learning ---- */

typedef struct {
    const Network *net;
    const Learning *how;
    const Samples *samples;
    float *grads, *rooms; /* one after the other for each thread */
    size_t room;
    double *sums;         /* [threads][METRICS] */
    double *lengths;      /* [threads]: squares of the parts of a gradient */
    atomic_int go, arrived, turn;
} Job;

/* Wait until all threads are here. */
static void meet(Job *job) {
    const int threads = (int)job->how->threads;
    if (threads == 1) return;
    const int turn = atomic_load_explicit(&job->turn, memory_order_relaxed);
    if (atomic_fetch_add(&job->arrived, 1) == threads - 1) {
        atomic_store_explicit(&job->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&job->turn, turn + 1, memory_order_release);
        return;
    }
    for (int tries = 0; atomic_load_explicit(&job->turn, memory_order_acquire) == turn; tries++) {
#if defined(__x86_64__)
        if (tries < 2000)
            __builtin_ia32_pause();
        else
#endif
            sched_yield(); /* whoever is missing may need this core */
    }
}

typedef struct {
    float mean, scale;
} Normal;

/* Mean and inverse deviation of the minibatch's advantages. */
INLINE Normal normal(const Samples *s, const int64_t *rows, int64_t count, int wanted) {
    if (!wanted || count < 2) return (Normal){0, 1};
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) sum += s->advantage[rows[i]];
    const double mean = sum / count;
    for (int64_t i = 0; i < count; i++) {
        const double off = s->advantage[rows[i]] - mean;
        squares += off * off;
    }
    return (Normal){(float)mean, (float)(1 / (sqrt(squares / (count - 1)) + 1e-8))};
}

/* The loss of one row: its slopes take the place of logits or means and of the value; those of log_std are added. */
INLINE void row_loss(const Network *net, const Learning *how, const Samples *s, int64_t row, float advantage, float share,
                     float sure, float *params, float *value, float *log_std, double *sums) {
    const int64_t n = net->actions, at = s->action_at ? s->action_at[row] : row;
    const float *taken = (const float *)s->action + at * n;
    float log_prob, entropy = 0, scaled[n];
    int64_t chosen = 0;
    if (net->gaussian) {
        float squares = 0;
        for (int64_t a = 0; a < n; a++) {
            scaled[a] = (taken[a] - params[a]) * expf(-net->log_std[a]);
            squares += scaled[a] * scaled[a];
        }
        log_prob = -0.5f * squares - sure;
        entropy = sure + 0.5f * n;
    } else {
        chosen = ((const int64_t *)s->action)[at] - net->start;
        log_softmax(n, params);
        log_prob = params[chosen];
        for (int64_t a = 0; a < n; a++) {
            scaled[a] = expf(params[a]);
            entropy -= scaled[a] * params[a];
        }
    }
    const float log_ratio = log_prob - s->log_prob[s->at ? s->at[row] : row], ratio = expf(log_ratio);
    float bounded = ratio < 1 - how->clip ? 1 - how->clip : ratio;
    bounded = bounded > 1 + how->clip ? 1 + how->clip : bounded;
    const float gain = ratio * advantage, bound = bounded * advantage;
    float error = *value - s->returns[row], square = error * error;
    if (how->value_clip > 0) {
        const float moved = *value - s->old[row];
        float kept = moved < -how->value_clip ? -how->value_clip : moved;
        kept = kept > how->value_clip ? how->value_clip : kept;
        const float near = s->old[row] + kept - s->returns[row];
        if (moved != kept && near * near > square) error = 0;
        square = near * near > square ? near * near : square;
    }
    sums[0] -= gain < bound ? gain : bound;
    sums[1] += 0.5 * square;
    sums[2] += entropy;
    sums[3] += ratio - log_ratio - 1;
    sums[4] += ratio != bounded;
    /* The objective is the lesser of gain and bound; where that is the bound, it is flat. */
    const float slope = gain <= bound ? -gain * share : 0, bonus = -how->bonus * share;
    *value = error * how->value_coef * share;
    for (int64_t a = 0; a < n; a++)
        if (net->gaussian) {
            log_std[a] += slope * (scaled[a] * scaled[a] - 1) + bonus;
            params[a] = slope * scaled[a] * expf(-net->log_std[a]);
        } else
            params[a] = slope * ((a == chosen) - scaled[a]) - bonus * scaled[a] * (params[a] + entropy);
}

/* From the slopes of heads to those of all weights, written into `grad`, which is laid out as how->flat. */
INLINE void backward(const Network *net, const Learning *how, Room *room, int64_t rows, float *grad) {
    for (int twin = 0; twin < 2; twin++) {
        const int64_t outputs = twin ? 1 : net->actions, top = net->width[net->depth - 1];
        const float *head = twin ? net->critic : net->actor, *last = room->out[twin][net->depth - 1];
        float *slopes = twin ? room->value : room->params;
        product(outputs, top, rows, slopes, 1, outputs, last, top, grad + (head - how->flat), top, 0);
        columns(rows, outputs, slopes, grad + ((twin ? net->critic_bias : net->actor_bias) - how->flat));
        float *below = room->slope[0], *other = room->slope[1];
        product(rows, top, outputs, slopes, outputs, 1, head, top, below, top, 0);
        for (int64_t l = net->depth - 1; l >= 0; l--) {
            const int64_t width = net->width[l], inputs = l ? net->width[l - 1] : net->inputs;
            const float *out = room->out[twin][l], *x = l ? room->out[twin][l - 1] : room->x;
            const float *weight = net->weight[l] + twin * inputs * width;
            if (net->tanh[l])
                for (int64_t i = 0; i < rows * width; i++) below[i] *= 1 - out[i] * out[i];
            else
                for (int64_t i = 0; i < rows * width; i++) below[i] = out[i] > 0 ? below[i] : 0;
            product(inputs, width, rows, x, 1, inputs, below, width, grad + (weight - how->flat), width, 0);
            columns(rows, width, below, grad + (net->bias[l] + twin * width - how->flat));
            if (!l) break;
            for (int64_t i = 0; i < inputs; i++)
                for (int64_t j = 0; j < width; j++) room->turned[j * inputs + i] = weight[i * width + j];
            product(rows, inputs, width, below, width, 1, room->turned, inputs, other, inputs, 0);
            float *swap = below;
            below = other, other = swap;
        }
    }
}

/* This thread's part of the step: sum the gradients, shorten them, Adam. The length of the whole gradient. */
INLINE double step(Job *job, int64_t rank) {
    const Learning *how = job->how;
    const int64_t begin = how->size * rank / how->threads, end = how->size * (rank + 1) / how->threads;
    double squares = 0, length = 0;
    for (int64_t i = begin; i < end; i++) {
        float sum = job->grads[i];
        for (int64_t t = 1; t < how->threads; t++) sum += job->grads[t * how->size + i];
        how->grad[i] = sum;
    }
    for (int64_t i = begin; i < end;) { /* in single precision for a stretch: that is vectorised */
        const int64_t stop = i + 256 < end ? i + 256 : end;
        squares += dot(stop - i, how->grad + i, how->grad + i);
        i = stop;
    }
    job->lengths[rank] = squares;
    meet(job);
    for (int64_t t = 0; t < how->threads; t++) length += job->lengths[t];
    length = sqrt(length);
    const float shorter = length + 1e-6 > how->longest ? (float)(how->longest / (length + 1e-6)) : 1;
    const double steps = how->steps[0] + 1.0;
    const float size = (float)(how->lr / (1 - pow(0.9, steps))), root = (float)sqrt(1 - pow(0.999, steps));
    for (int64_t i = begin; i < end; i++) {
        const float slope = how->grad[i] *= shorter;
        const float moment = how->moments[i] += 0.1f * (slope - how->moments[i]);
        const float square = how->squares[i] = 0.999f * how->squares[i] + 0.001f * slope * slope;
        how->flat[i] -= size * moment / (sqrtf(square) / root + how->eps);
    }
    meet(job);
    if (!rank) how->steps[0] = (float)steps;
    return length;
}

/* All minibatches, one thread's share of each. */
FAST void small_work(Job *job, int64_t rank) {
    const Network *net = job->net;
    const Learning *how = job->how;
    const Samples *s = job->samples;
    double *sums = job->sums + rank * METRICS;
    float *grad = job->grads + rank * how->size;
    Room room;
    lay_out(&room, net, s->minibatch / how->threads + 1, job->rooms + rank * job->room);
    for (int64_t first = 0; first < s->count; first += s->minibatch) {
        const int64_t count = s->count - first < s->minibatch ? s->count - first : s->minibatch;
        const int64_t begin = count * rank / how->threads, rows = count * (rank + 1) / how->threads - begin;
        const int64_t *mine = s->rows + first + begin;
        const Normal found = normal(s, s->rows + first, count, (int)how->normalize);
        const float sure = net->gaussian ? spread(net) + net->actions * HALF_LOG_2PI : 0;
        for (int64_t r = 0; r < rows; r++)
            look(net, s->obs + (s->obs_at ? s->obs_at[mine[r]] : mine[r]) * net->inputs, room.x + r * net->inputs);
        forward(net, &room, rows);
        float *log_std = net->gaussian ? grad + (net->log_std - how->flat) : 0;
        if (log_std) memset(log_std, 0, net->actions * sizeof *log_std);
        for (int64_t r = 0; r < rows; r++)
            row_loss(net, how, s, mine[r], (s->advantage[mine[r]] - found.mean) * found.scale, 1.0f / count, sure,
                     room.params + r * net->actions, room.value + r, log_std, sums);
        backward(net, how, &room, rows, grad);
        meet(job);
        const double length = step(job, rank);
        meet(job); /* nobody reads the weights, or counts steps, before all are there */
        if (!rank) sums[METRICS - 1] += length * count;
    }
}

typedef struct {
    Job *job;
    int64_t rank;
} Task;

static void *helper(void *given) {
    const Task *task = given;
    int go;
    while (!(go = atomic_load_explicit(&task->job->go, memory_order_acquire))) sched_yield();
    if (go > 0) small_work(task->job, task->rank);
    return 0;
}

/* Gradient steps over all samples, in minibatches; the values of METRICS summed over samples are added to `sums`.
 * 0: done. 1: there is no memory, and nothing was done. */
int small_ppo(const Network *net, Learning *how, const Samples *samples, double *sums) {
    enum { MOST = 64 };
    double partial[MOST * METRICS] = {0}, lengths[MOST];
    Job job = {.net = net, .how = how, .samples = samples, .sums = partial, .lengths = lengths};
    const int64_t wanted = how->threads < MOST ? how->threads : MOST;
    pthread_t threads[MOST];
    Task tasks[MOST];
    int64_t started = 1;
    for (; started < wanted; started++) {
        tasks[started] = (Task){&job, started};
        if (pthread_create(&threads[started], 0, helper, &tasks[started])) break; /* as many as there may be */
    }
    how->threads = started;
    job.room = room_size(net, samples->minibatch / started + 1);
    job.grads = malloc(started * how->size * sizeof(float));
    job.rooms = malloc(started * job.room * sizeof(float));
    const int ready = job.grads && job.rooms;
    atomic_store(&job.go, ready ? 1 : -1);
    if (ready) small_work(&job, 0);
    for (int64_t t = 1; t < started; t++) pthread_join(threads[t], 0);
    for (int64_t t = 0; t < started; t++)
        for (int k = 0; k < METRICS; k++) sums[k] += partial[t * METRICS + k];
    free(job.grads);
    free(job.rooms);
    return !ready;
}
