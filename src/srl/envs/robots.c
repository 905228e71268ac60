/* Robots of MuJoCo, one after the other in one simulation that stays in the cache (mujoco.py). */
#include <stdint.h>

typedef struct {
    void (*set)(const void *, void *, const double *, uint32_t);
    void (*step)(const void *, void *);
    void (*get)(const void *, const void *, double *, uint32_t);
    const void *model;
    void *data;
    double *control;
    int64_t controls, frames, size, parts;
} simulation;

/* Steps every robot that is running, `frames` times: its state goes into the simulation and comes back. */
void robots_step(const simulation *in, int64_t count, const uint8_t *running, const float *control, double *states) {
    for (int64_t at = 0; at < count; at++) {
        if (!running[at]) continue;
        in->set(in->model, in->data, states + at * in->size, (uint32_t)in->parts);
        for (int64_t i = 0; i < in->controls; i++) in->control[i] = control[at * in->controls + i];
        for (int64_t i = 0; i < in->frames; i++) in->step(in->model, in->data);
        in->get(in->model, in->data, states + at * in->size, (uint32_t)in->parts);
    }
}
