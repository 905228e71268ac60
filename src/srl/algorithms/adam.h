/* Adam, Kingma & Ba (2015), on all weights at once (adam.c). */
#include <stdint.h>

/* The square of the length of a gradient. */
double adam_square(const float *grad, int64_t size, int64_t threads);

/* One step along a gradient whose length squared is `sum`, shortened to `longest`; `steps` counts them. The gradient's length. */
double adam_step(float *flat, const float *grad, float *moments, float *squares, float *steps, int64_t size, double lr,
                 double eps, double sum, double longest, int64_t threads);
