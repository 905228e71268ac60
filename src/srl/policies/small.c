/* The arithmetic of a small actor-critic: acting, and whole passes of PPO with Adam (ADR 13).
 *
 * Two layers of 64 units and 256 samples are so little work that calling numpy or torch a hundred times costs more than
 * the products themselves. Here a pass over a batch is one call: samples are gathered from the slab, and network, loss,
 * gradient and step are done minibatch by minibatch, on the memory of the torch weights.
 *
 * A minibatch is divided into parts, always in the same way, and their gradients are summed in the same order, so that a
 * result depends on no thread. The caller takes one part after the other; helpers take parts too, but only in time that
 * nobody else wants (SCHED_IDLE): actors wait now and then, and this is what their cores do meanwhile. A helper that was
 * pushed aside is not waited for: the caller does its part again. So that it may be late without harm, it only sees
 * memory of the team: copies of the minibatch and of the weights, and its own desk. Weights on their way to a helper and
 * gradients on their way back are written past the caches.
 *
 * Actor and critic are two networks of the same shape ("twins"): every hidden layer has weights [2][inputs][outputs] and
 * biases [2][outputs]; the heads have weights [outputs][inputs]. All arrays are rows after rows. The structures are
 * repeated in small.py.
 */
#include "../algorithms/adam.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEEPEST 8
#define METRICS 6
#define LINE 16 /* numbers in a line of the cache */

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
    int64_t normalize;
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
    /* Where there are several trainers, else NULL: for every minibatch the samples of all, the mean of their advantages
       and what these are multiplied with; and who adds up gradients over all (not 0: somebody is gone). */
    int64_t minibatches;
    const double *norms;
    int (*meet)(void);
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

/* Copy to a line's begin in memory that another core reads: past the caches. To get lines back that the other core has in
   its own takes ten times as long. */
static void hand_over(float *to, const float *from, int64_t count) {
#if defined(__SSE2__)
    typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) __builtin_ia32_movntps(to + i, *(const v4 *)(from + i));
    memcpy(to + i, from + i, (count - i) * sizeof *to);
    __builtin_ia32_sfence();
#else
    memcpy(to, from, count * sizeof *to);
#endif
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

enum { PARTS = 16, FEWEST = 64, HELPERS = 7 }; /* parts of a minibatch, rows of a part, helpers of a team */

/* What one thread writes. */
typedef struct Team Team;
typedef struct {
    Team *team;
    Room room;
    float *memory, *grads; /* [PARTS][stride] */
    double sums[PARTS][METRICS];
    _Atomic uint64_t done[PARTS]; /* the last minibatch of which this part was finished here */
} Desk;

/* Those who work on minibatches of one network, and what they read. */
struct Team {
    Network mine, net; /* that of the caller, and the helpers' with the weights in `flat` */
    Learning how;
    int64_t size, stride, minibatch, most, count, parts; /* most: rows of a part; count: rows of this minibatch */
    float *memory, *flat, *x, *log_prob, *advantage, *returns, *old, *taken;
    int64_t *chosen;
    float sure, share; /* share: of one sample in the mean */
    _Atomic uint64_t claim; /* number of the minibatch << 8 | parts nobody has taken */
    atomic_int users, closed, resting;
    pthread_mutex_t mutex;
    pthread_cond_t woken;
    double lasts; /* seconds of a part */
    int64_t desks;
    Desk desk[1 + HELPERS];
};

/* Give them mean 0 and deviation 1. */
static void normalize(float *x, int64_t count) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i];
    const double mean = sum / count;
    for (int64_t i = 0; i < count; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float middle = (float)mean, scale = (float)(1 / (sqrt(squares / (count - 1)) + 1e-8));
    for (int64_t i = 0; i < count; i++) x[i] = (x[i] - middle) * scale;
}

/* Copies the next minibatch to the team. */
INLINE void gather(Team *team, const Network *net, const Samples *s, const int64_t *rows, int64_t count,
                   const double *norm) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = rows[i], at = s->action_at ? s->action_at[row] : row;
        look(net, s->obs + (s->obs_at ? s->obs_at[row] : row) * net->inputs, team->x + i * net->inputs);
        if (net->gaussian)
            memcpy(team->taken + i * net->actions, (const float *)s->action + at * net->actions,
                   net->actions * sizeof(float));
        else
            team->chosen[i] = ((const int64_t *)s->action)[at] - net->start;
        team->log_prob[i] = s->log_prob[s->at ? s->at[row] : row];
        team->advantage[i] = s->advantage[row];
        team->returns[i] = s->returns[row];
        team->old[i] = s->old[row];
    }
    if (norm)
        for (int64_t i = 0; i < count; i++) team->advantage[i] = (float)((team->advantage[i] - norm[1]) * norm[2]);
    else if (team->how.normalize && count > 1)
        normalize(team->advantage, count);
    team->count = count, team->share = (float)(1 / (norm ? norm[0] : (double)count));
    team->parts = (count + team->most - 1) / team->most;
    team->sure = net->gaussian ? spread(net) + net->actions * HALF_LOG_2PI : 0;
}

/* The loss of one row: its slopes take the place of logits or means and of the value; those of log_std are added. */
INLINE void row_loss(const Team *team, const Network *net, int64_t row, float share, float *params, float *value,
                     float *log_std, double *sums) {
    const Learning *how = &team->how;
    const int64_t n = net->actions;
    const float *taken = team->taken + row * n, sure = team->sure, advantage = team->advantage[row];
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
        chosen = team->chosen[row];
        log_softmax(n, params);
        log_prob = params[chosen];
        for (int64_t a = 0; a < n; a++) {
            scaled[a] = expf(params[a]);
            entropy -= scaled[a] * params[a];
        }
    }
    const float log_ratio = log_prob - team->log_prob[row], ratio = expf(log_ratio);
    float bounded = ratio < 1 - how->clip ? 1 - how->clip : ratio;
    bounded = bounded > 1 + how->clip ? 1 + how->clip : bounded;
    const float gain = ratio * advantage, bound = bounded * advantage;
    float error = *value - team->returns[row], square = error * error;
    if (how->value_clip > 0) {
        const float moved = *value - team->old[row];
        float kept = moved < -how->value_clip ? -how->value_clip : moved;
        kept = kept > how->value_clip ? how->value_clip : kept;
        const float near = team->old[row] + kept - team->returns[row];
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

/* From the slopes of heads to those of all weights, written into `grad`, which is laid out as `flat`. */
INLINE void backward(const Network *net, const float *flat, Room *room, int64_t rows, float *grad) {
    for (int twin = 0; twin < 2; twin++) {
        const int64_t outputs = twin ? 1 : net->actions, top = net->width[net->depth - 1];
        const float *head = twin ? net->critic : net->actor, *last = room->out[twin][net->depth - 1];
        float *slopes = twin ? room->value : room->params;
        product(outputs, top, rows, slopes, 1, outputs, last, top, grad + (head - flat), top, 0);
        columns(rows, outputs, slopes, grad + ((twin ? net->critic_bias : net->actor_bias) - flat));
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
            product(inputs, width, rows, x, 1, inputs, below, width, grad + (weight - flat), width, 0);
            columns(rows, width, below, grad + (net->bias[l] + twin * width - flat));
            if (!l) break;
            for (int64_t i = 0; i < inputs; i++)
                for (int64_t j = 0; j < width; j++) room->turned[j * inputs + i] = weight[i * width + j];
            product(rows, inputs, width, below, width, 1, room->turned, inputs, other, inputs, 0);
            float *swap = below;
            below = other, other = swap;
        }
    }
}

/* One part of minibatch `number`, at one's desk. */
FAST void small_part(Desk *desk, uint64_t number, int64_t part) {
    const Team *team = desk->team;
    const int helps = desk != team->desk;
    const Network *net = helps ? &team->net : &team->mine;
    const float *flat = helps ? team->flat : team->how.flat;
    const int64_t count = team->count, parts = team->parts;
    const int64_t begin = count * part / parts, rows = count * (part + 1) / parts - begin;
    if (rows > team->most || begin + rows > team->minibatch) return; /* the next minibatch, read by one who is late */
    Room *room = &desk->room;
    float *result = desk->grads + part * team->stride, *grad = helps ? desk->grads - team->stride : result;
    double *sums = desk->sums[part];
    memset(sums, 0, METRICS * sizeof *sums);
    memcpy(room->x, team->x + begin * net->inputs, rows * net->inputs * sizeof *room->x);
    forward(net, room, rows);
    float *log_std = net->gaussian ? grad + (net->log_std - flat) : 0;
    if (log_std) memset(log_std, 0, net->actions * sizeof *log_std);
    for (int64_t r = 0; r < rows; r++)
        row_loss(team, net, begin + r, team->share, room->params + r * net->actions, room->value + r, log_std, sums);
    backward(net, flat, room, rows, grad);
    if (helps) hand_over(result, grad, team->size);
    atomic_store_explicit(&desk->done[part], number, memory_order_release);
}

/* Sum the gradients of all parts; the square of the length of the sum. */
FAST double small_sum(Team *team, float *const *grads) {
    const int64_t size = team->size;
    float *restrict grad = team->how.grad;
    double sum = 0;
    for (int64_t i = 0; i < size;) { /* a stretch at a time: it stays in the cache */
        const int64_t begin = i, stop = i + 256 < size ? i + 256 : size;
        const float *restrict first = grads[0];
        for (; i < stop; i++) grad[i] = first[i];
        for (int64_t p = 1; p < team->parts; p++) {
            const float *restrict other = grads[p];
            for (i = begin; i < stop; i++) grad[i] += other[i];
        }
        sum += dot(stop - begin, grad + begin, grad + begin);
    }
    return sum;
}

/* One step along the gradient, whose length squared is `sum`. How long it was. */
static double small_step(Team *team, double sum) {
    const Learning *how = &team->how;
    const double length = adam_step(how->flat, how->grad, how->moments, how->squares, how->steps, team->size, how->lr,
                                    how->eps, sum, how->longest, 1);
    if (team->desks > 1) hand_over(team->flat, how->flat, team->size);
    return length;
}

/* A part that nobody has taken, and of which minibatch; -1 if there is none. */
static int64_t take(Team *team, uint64_t *number) {
    uint64_t claim = atomic_load_explicit(&team->claim, memory_order_acquire);
    while (claim & 255)
        if (atomic_compare_exchange_weak(&team->claim, &claim, claim - 1)) {
            *number = claim >> 8;
            return (int64_t)(claim & 255) - 1;
        }
    return -1;
}

static void leave(Team *team) {
    if (atomic_fetch_sub(&team->users, 1) > 1) return;
    for (int64_t d = 0; d < team->desks; d++) free(team->desk[d].memory);
    pthread_mutex_destroy(&team->mutex);
    pthread_cond_destroy(&team->woken);
    free(team->memory);
    free(team->chosen);
    free(team);
}

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *helper(void *given) {
    Desk *desk = given;
    Team *team = desk->team;
#ifdef SCHED_IDLE
    const struct sched_param none = {0};
    pthread_setschedparam(pthread_self(), SCHED_IDLE, &none);
#endif
    for (int tries = 0; !atomic_load_explicit(&team->closed, memory_order_relaxed);) {
        uint64_t number;
        const int64_t part = take(team, &number);
        if (part >= 0) {
            small_part(desk, number, part), tries = 0;
            sched_yield(); /* a kernel may have let it begin although somebody waits, and would for milliseconds */
        } else if (atomic_load_explicit(&team->resting, memory_order_relaxed)) {
            pthread_mutex_lock(&team->mutex);
            while (atomic_load(&team->resting) && !atomic_load(&team->closed))
                pthread_cond_wait(&team->woken, &team->mutex);
            pthread_mutex_unlock(&team->mutex);
        } else if (++tries < 1000)
            relax();
        else
            sched_yield();
    }
    leave(team);
    return 0;
}

static void rest(Team *team, int resting) {
    pthread_mutex_lock(&team->mutex);
    atomic_store(&team->resting, resting);
    pthread_cond_broadcast(&team->woken);
    pthread_mutex_unlock(&team->mutex);
}

/* So many numbers in whole lines. */
static int64_t lines(int64_t count) {
    return (count + LINE - 1) / LINE * LINE;
}

static float *zeros(int64_t count) {
    const size_t size = lines(count) * sizeof(float);
    float *memory = aligned_alloc(LINE * sizeof(float), size);
    return memory ? memset(memory, 0, size) : 0;
}

/* For minibatches of at most so many rows. NULL: there is no memory. */
Team *small_team(const Network *net, int64_t size, int64_t minibatch, int64_t helpers) {
    Team *team = calloc(1, sizeof *team);
    if (!team) return 0;
    const int64_t fewest = (minibatch + PARTS - 1) / PARTS;
    *team = (Team){.size = size, .stride = lines(size), .minibatch = minibatch, .most = fewest > FEWEST ? fewest : FEWEST};
    const int64_t parts = (minibatch + team->most - 1) / team->most;
    atomic_init(&team->users, 1);
    atomic_init(&team->resting, 1);
    pthread_mutex_init(&team->mutex, 0);
    pthread_cond_init(&team->woken, 0);
    team->memory = zeros(team->stride + minibatch * (net->inputs + net->actions + 4));
    team->chosen = calloc(minibatch, sizeof *team->chosen);
    helpers = helpers < parts - 1 ? helpers : parts - 1;
    helpers = helpers < HELPERS ? helpers : HELPERS;
    const size_t room = lines(room_size(net, team->most));
    int whole = team->memory && team->chosen;
    for (; whole && team->desks <= helpers; team->desks++) {
        Desk *desk = &team->desk[team->desks];
        desk->team = team;
        desk->memory = zeros(room + (parts + 1) * team->stride); /* one where a helper works */
        if (!desk->memory) break;
        lay_out(&desk->room, net, team->most, desk->memory);
        desk->grads = desk->memory + room + team->stride;
    }
    if (!team->desks) {
        leave(team);
        return 0;
    }
    float *at = team->memory;
    team->flat = at, at += team->stride;
    team->x = at, at += minibatch * net->inputs;
    team->taken = at, at += minibatch * net->actions;
    team->log_prob = at, team->advantage = at + minibatch, team->returns = at + 2 * minibatch;
    team->old = at + 3 * minibatch;
    for (int64_t d = 1; d < team->desks; d++) {
        pthread_t thread;
        atomic_fetch_add(&team->users, 1);
        if (pthread_create(&thread, 0, helper, &team->desk[d]))
            atomic_fetch_sub(&team->users, 1); /* as many as there may be */
        else
            pthread_detach(thread);
    }
    return team;
}

void small_team_close(Team *team) {
    atomic_store(&team->closed, 1);
    rest(team, 0);
    leave(team);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Whose result of this part counts. The caller waits for a helper no longer than it would take to do the part again. */
static Desk *settle(Team *team, uint64_t number, int64_t part, double *since) {
    for (;;) {
        for (int64_t d = 0; d < team->desks; d++)
            if (atomic_load_explicit(&team->desk[d].done[part], memory_order_acquire) == number) return &team->desk[d];
        if (now() - *since > 1.5 * team->lasts) {
            small_part(&team->desk[0], number, part);
            return &team->desk[0];
        }
        relax();
    }
}

/* The same place among the team's weights. */
static float *moved(const Team *team, const Learning *how, const float *weight) {
    return weight ? team->flat + (weight - how->flat) : 0;
}

/* The gradient of one minibatch, in how->grad; the values of METRICS but the last are added to `sums`. The square of the
   gradient's length. */
static double minibatch(Team *team, uint64_t *number, double *sums) {
    float *grads[PARTS];
    atomic_store_explicit(&team->claim, ++*number << 8 | (uint64_t)team->parts, memory_order_release);
    double begin = now();
    for (int64_t part; (part = take(team, number)) >= 0;) {
        small_part(&team->desk[0], *number, part);
        const double end = now();
        team->lasts = end - begin, begin = end;
    }
    for (int64_t part = 0; part < team->parts; part++) {
        const Desk *desk = settle(team, *number, part, &begin);
        grads[part] = desk->grads + part * team->stride;
        for (int k = 0; k < METRICS; k++) sums[k] += desk->sums[part][k];
    }
    return small_sum(team, grads);
}

/* Gradient steps over all samples, in minibatches; the values of METRICS summed over samples are added to `sums`. Not 0:
   the trainers could not meet. */
int small_ppo(Team *team, const Network *net, const Learning *how, const Samples *samples, double *sums) {
    team->mine = team->net = *net, team->how = *how;
    for (int64_t l = 0; l < net->depth; l++) {
        team->net.weight[l] = moved(team, how, net->weight[l]);
        team->net.bias[l] = moved(team, how, net->bias[l]);
    }
    team->net.actor = moved(team, how, net->actor), team->net.actor_bias = moved(team, how, net->actor_bias);
    team->net.critic = moved(team, how, net->critic), team->net.critic_bias = moved(team, how, net->critic_bias);
    team->net.log_std = moved(team, how, net->log_std);
    hand_over(team->flat, how->flat, team->size);
    uint64_t number = atomic_load(&team->claim) >> 8;
    int gone = 0;
    rest(team, 0);
    for (int64_t step = 0; !gone && step < samples->minibatches; step++) {
        const int64_t first = step * samples->minibatch, left = samples->count - first;
        const int64_t count = left < 0 ? 0 : left < samples->minibatch ? left : samples->minibatch;
        double square = 0;
        if (count) {
            gather(team, net, samples, samples->rows + first, count, samples->norms ? samples->norms + 3 * step : 0);
            square = minibatch(team, &number, sums);
        } else /* the others have more samples */
            memset(how->grad, 0, team->size * sizeof *how->grad);
        if (samples->meet) {
            gone = samples->meet();
            square = adam_square(how->grad, team->size, 1);
        }
        if (!gone) sums[METRICS - 1] += small_step(team, square) * count;
    }
    rest(team, 1);
    return gone;
}
