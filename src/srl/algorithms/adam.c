/* Adam, see adam.h: a gradient is read twice and written never. */
#include "adam.h"

#include <math.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define STRETCH 256 /* for which single precision will do */
#define CHUNK 65536 /* that is one piece of work */

typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias)); /* wider ones are slow where there are none */

FAST double adam_stretches(const float *grad, int64_t size) {
    double sum = 0;
    int64_t i = 0;
    for (; i + STRETCH <= size; i += STRETCH) {
        v4 part[8] = {{0}};
        for (int64_t at = 0; at < STRETCH; at += 32)
            for (int k = 0; k < 8; k++) {
                const v4 x = *(const v4 *)(grad + i + at + 4 * k);
                part[k] += x * x;
            }
        for (int k = 1; k < 8; k++) part[0] += part[k];
        for (int k = 0; k < 4; k++) sum += part[0][k];
    }
    for (; i < size; i++) sum += grad[i] * grad[i];
    return sum;
}

double adam_square(const float *grad, int64_t size, int64_t threads) {
    double sums[(size + CHUNK - 1) / CHUNK + 1], sum = 0;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < size; i += CHUNK) sums[i / CHUNK] = adam_stretches(grad + i, size - i < CHUNK ? size - i : CHUNK);
    for (int64_t i = 0; i < size; i += CHUNK) sum += sums[i / CHUNK];
    return sum;
}

FAST void adam_chunk(float *restrict flat, const float *restrict grad, float *restrict moments, float *restrict squares,
                     int64_t size, float shorter, float rate, float root, float eps) {
    for (int64_t i = 0; i < size; i++) {
        const float slope = grad[i] * shorter, moment = moments[i] + 0.1f * (slope - moments[i]);
        const float square = 0.999f * squares[i] + 0.001f * slope * slope;
        moments[i] = moment, squares[i] = square;
        flat[i] -= rate * moment / (sqrtf(square) * root + eps);
    }
}

double adam_step(float *flat, const float *grad, float *moments, float *squares, float *steps, int64_t size, double lr,
                 double eps, double sum, double longest, int64_t threads) {
    const double length = sqrt(sum), count = *steps + 1.0;
    const float shorter = length + 1e-6 > longest ? (float)(longest / (length + 1e-6)) : 1;
    const float rate = (float)(lr / (1 - pow(0.9, count))), root = (float)(1 / sqrt(1 - pow(0.999, count)));
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < size; i += CHUNK)
        adam_chunk(flat + i, grad + i, moments + i, squares + i, size - i < CHUNK ? size - i : CHUNK, shorter, rate, root,
                   (float)eps);
    *steps = (float)count;
    return length;
}
