/* Patches of images that have been seen (repeats.c). */
#include <stdint.h>

#define REPEATS_LAYERS 4 /* blocks of pixels, and the patches of three layers */

/* The different patches of a layer, each told by `words` numbers. */
typedef struct {
    uint32_t *kept;
    int64_t words, count, most;
    uint32_t *table; /* number + 1, or 0 */
    uint64_t mask;
} Seen;

/* How large a table has to be. */
uint64_t repeats_slots(int64_t most);

/* How many blocks and patches there are in so many images, those that are equal counted each by itself. */
void repeats_sizes(int64_t images, int64_t height, int64_t width, int64_t *places);

/* Adds what is in these images to what has been seen; to: the numbers at all places, by layer. 0: there are too many.
 * before: what the first `known` images looked like when the numbers there were written; where they look like that still,
 * the numbers are left as they are. All images are written there. NULL: they are compared with one another instead. */
int repeats_more(Seen *seen, const uint8_t *from, uint8_t *before, int64_t known, int64_t images, int64_t channels,
                 int64_t height, int64_t width, uint32_t *const *to);
