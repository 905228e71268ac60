/* MuJoCo's robots, one after the other, without Python in between (mujoco.py). */
#include <stdint.h>
#include <string.h>

typedef struct {
    void *data;
    double *control, *position, *velocity;
} robot;

/* Steps every robot that is `running`, `frames` times, and gathers where all were and are. */
void robots_step(void (*step)(const void *, void *), const void *model, int64_t frames, const robot *robots,
                 int64_t count, const uint8_t *running, const float *control, const int64_t *sizes, double *before,
                 double *position, double *velocity) {
    const int64_t controls = sizes[0], positions = sizes[1], velocities = sizes[2];
    for (int64_t at = 0; at < count; at++) {
        const robot *each = &robots[at];
        before[at] = each->position[0];
        if (running[at]) {
            for (int64_t i = 0; i < controls; i++) each->control[i] = control[at * controls + i];
            for (int64_t i = 0; i < frames; i++) step(model, each->data);
        }
        memcpy(position + at * positions, each->position, positions * sizeof(double));
        memcpy(velocity + at * velocities, each->velocity, velocities * sizeof(double));
    }
}
