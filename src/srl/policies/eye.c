/* What a policy sees in images, in one call: the convolutions of images.py and the dense layer after them, for acting (eye.py).
 *
 * What was seen before with the same weights is remembered. A sum is made in the same order however many rows there are, so
 * what is seen in an image depends neither on the others nor on what is remembered. The structures are repeated in eye.py. */
#include "products.h"
#include "repeats.h"

#include <math.h>
#include <string.h>

#define BLOCK 4
#define LAYERS REPEATS_LAYERS
#define LARGEST 32767.0f
#define LEAST 1e-20f /* smaller weights do not count */
#define MANY 1500 /* patches that are remembered, for each image that is seen at a time */

typedef struct {
    int64_t channels, height, width;
    Layer layers[LAYERS];
    Seen seen[LAYERS];   /* blocks, and the patches of the first three layers */
    float *made[LAYERS]; /* the blocks' pixels, and what layers made of patches */
    int64_t most[LAYERS];
    uint32_t *places[LAYERS]; /* what is where */
    uint8_t *before;          /* the images seen last */
    int64_t known;            /* how many of them are */
} Eye;

/* Pack weights into panels: that of output n and number k of all pieces is at n * across + at[k]. Where there are scales, in 16
 * bits: the largest weight of an output is LARGEST, and bias[n], in those units too, goes to `biases`. */
FAST void eye_pack(const Layer *layer, const float *weight, const int64_t *at, int64_t across, float scale, const float *bias,
                   float *biases) {
    const int64_t inner = layer->pieces * layer->size, panel = products_panel(layer), outputs = layer->outputs;
    float *most = layer->scales;
    for (int64_t n = 0; most && n < outputs; n++) most[n] = LEAST;
    for (int64_t k = 0; most && k < inner; k++)
        for (int64_t n = 0; n < outputs; n++) {
            const float size = fabsf(weight[n * across + at[k]]);
            most[n] = size > most[n] ? size : most[n];
        }
    for (int64_t column = 0; column < outputs; column += panel) {
        const float *from = weight + column * across;
        float units[PANEL];
        for (int64_t c = 0; most && c < panel; c++) {
            units[c] = LARGEST / most[column + c];
            layer->scales[column + c] = scale / units[c], biases[column + c] = bias[column + c] * (units[c] / scale);
        }
        for (int64_t k = 0; k < inner; k++) {
            const int64_t to = column * inner + k * panel;
            if (most)
                for (int64_t c = 0; c < panel; c++) {
                    const float found = from[c * across + at[k]] * units[c];
                    ((int16_t *)layer->packed)[to + c] = (int16_t)(found + (found < 0 ? -0.5f : 0.5f));
                }
            else
                for (int64_t c = 0; c < panel; c++) ((float *)layer->packed)[to + c] = from[c * across + at[k]] * scale;
        }
    }
}

/* How many different ones of each kind are remembered. */
static void sizes(const Eye *eye, int64_t images, int64_t *most) {
    repeats_sizes(images, eye->height, eye->width, most);
    for (int at = 0; at < LAYERS; at++)
        if (most[at] < images * MANY) most[at] = images * MANY;
}

/* Numbers of 32 bits that the images seen last take. */
static int64_t pixels(const Eye *eye, int64_t images) {
    return (images * eye->channels * eye->height * eye->width + 3) / 4;
}

/* Numbers of 32 bits that the memory of an eye for so many images takes. */
int64_t eye_room(const Eye *eye, int64_t images) {
    int64_t most[LAYERS], places[LAYERS], sum = pixels(eye, images);
    sizes(eye, images, most);
    repeats_sizes(images, eye->height, eye->width, places);
    for (int at = 0; at < LAYERS; at++) {
        const int64_t words = at ? eye->layers[at - 1].pieces : eye->channels * BLOCK;
        const int64_t made = at ? eye->layers[at - 1].outputs : eye->channels * BLOCK * BLOCK;
        sum += most[at] * (words + made) + (int64_t)repeats_slots(most[at]) + places[at];
    }
    return sum;
}

/* Forget all that was seen. */
void eye_forget(Eye *eye) {
    eye->known = 0;
    for (int at = 0; at < LAYERS; at++) {
        Seen *seen = &eye->seen[at];
        seen->count = 0;
        memset(seen->table, 0, (seen->mask + 1) * sizeof *seen->table);
    }
}

/* Use this memory. */
void eye_open(Eye *eye, int64_t images, uint32_t *room) {
    int64_t places[LAYERS];
    sizes(eye, images, eye->most);
    repeats_sizes(images, eye->height, eye->width, places);
    for (int at = 0; at < LAYERS; at++) {
        const int64_t words = at ? eye->layers[at - 1].pieces : eye->channels * BLOCK;
        const int64_t made = at ? eye->layers[at - 1].outputs : eye->channels * BLOCK * BLOCK;
        const uint64_t slots = repeats_slots(eye->most[at]);
        eye->made[at] = (float *)room, room += eye->most[at] * made;
        eye->seen[at] = (Seen){room, words, 0, 0, room + eye->most[at] * words, slots - 1};
        room += eye->most[at] * words + (int64_t)slots;
        eye->places[at] = memset(room, 0, (size_t)places[at] * sizeof *room), room += places[at];
    }
    eye->before = (uint8_t *)room;
    eye_forget(eye);
}

/* Features of images of bytes. What has been seen before with the same weights is not worked out again. 0: they have too
 * little in common. */
int eye_see(Eye *eye, const uint8_t *images, int64_t rows, float *features) {
    int64_t before[LAYERS], places[LAYERS];
    repeats_sizes(rows, eye->height, eye->width, places);
    for (;;) {
        for (int at = 0; at < LAYERS; at++) before[at] = eye->seen[at].count, eye->seen[at].most = eye->most[at];
        if (before[0] + places[0] / 2 < eye->most[0]) eye->seen[0].most = before[0] + places[0] / 2;
        if (repeats_more(eye->seen, images, eye->before, eye->known, rows, eye->channels, eye->height, eye->width,
                         eye->places))
            break;
        eye_forget(eye);
        if (!before[0]) return 0;
    }
    if (eye->known < rows) eye->known = rows;
    const int64_t bytes = eye->channels * BLOCK * BLOCK;
    const uint8_t *blocks = (const uint8_t *)eye->seen[0].kept;
    for (int64_t i = before[0] * bytes; i < eye->seen[0].count * bytes; i++) eye->made[0][i] = blocks[i];
    for (int at = 1; at < LAYERS; at++) {
        const Layer *layer = &eye->layers[at - 1];
        products_through(layer, eye->made[at - 1], eye->seen[at].kept + before[at] * layer->pieces, eye->seen[at].count - before[at],
                eye->made[at] + before[at] * layer->outputs);
    }
    products_through(&eye->layers[LAYERS - 1], eye->made[LAYERS - 1], eye->places[LAYERS - 1], rows, features);
    return 1;
}
