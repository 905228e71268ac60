/* Generalised advantage estimates (returns.py explains the rules, and does the same with numpy). */
#include <stdint.h>

/* All are [steps][rows]; value, valid and first have one step more. */
void returns_gae(int64_t steps, int64_t rows, const float *reward, const float *value, const uint8_t *terminated,
                 const uint8_t *truncated, const uint8_t *valid, const uint8_t *first, float gamma, float decay,
                 float *advantage, uint8_t *complete) {
    for (int64_t row = 0; row < rows; row++) {
        float following = value[steps * rows + row], later = 0, owed = 0;
        int known = valid[steps * rows + row];
        for (int64_t at = (steps - 1) * rows + row; at >= 0; at -= rows) {
            if (terminated[at] || truncated[at]) {
                following = terminated[at] ? 0 : value[first[at + rows] ? at : at + rows];
                later = owed = 0;
                known = 1;
            }
            owed += reward[at];
            const float estimate = owed + gamma * following - value[at] + decay * later;
            advantage[at] = estimate;
            complete[at] = known && valid[at];
            if (valid[at]) {
                following = value[at];
                later = known ? estimate : 0;
                owed = 0;
                known = 1;
            }
        }
    }
}
