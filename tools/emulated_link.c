/* A network path between two namespaces, for kernels without netem: packets of two TUN devices pass
 * a queue with a rate, a buffer, a delay and a loss.
 *
 *   gcc -O2 -pthread -o emulated_link tools/emulated_link.c
 *   ip netns add a; ip netns add b
 *   ./emulated_link a b RTT_MS MBIT LOSS_PERCENT BUFFER_BYTES      (ends with its standard input)
 *
 * The namespaces get 10.9.0.1 and 10.9.0.2. TCP, its congestion control and its retransmissions are
 * the kernel's own. Segments stay together up to 64 KB (TSO) unless packets are to be lost: then
 * every packet of 1,500 bytes is lost on its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PACKET = 65536 + 64, RING = 1 << 15 };
static double delay_ns, ns_per_byte, loss;
static long buffer_bytes;

typedef struct { char *data; int size; int64_t sent, due; } Packet;
typedef struct { int from, to; uint64_t seed; long dropped, passed; } Direction;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static double dice(uint64_t *seed) {
    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    return (*seed >> 11) * 0x1p-53;
}

static void *carry(void *arg) {
    Direction *d = arg;
    Packet *ring = calloc(RING, sizeof *ring);
    long head = 0, tail = 0, unsent = 0, queued = 0; /* unsent: first packet that is in the buffer */
    int64_t free_at = 0;
    char *data = malloc(MAX_PACKET);
    for (int64_t t = now();;) {
        for (int burst = 0; burst < 32 && tail - head < RING - 1; burst++) {
            int size = read(d->from, data, MAX_PACKET);
            if (size <= 0) break;
            t = now();
            while (unsent < tail && ring[unsent % RING].sent <= t) queued -= ring[unsent++ % RING].size;
            if (queued + size > buffer_bytes || (loss > 0 && dice(&d->seed) < loss)) {
                d->dropped++;
                continue;
            }
            int64_t start = t > free_at ? t : free_at;
            free_at = start + (int64_t)(size * ns_per_byte);
            Packet *p = &ring[tail++ % RING];
            *p = (Packet){data, size, free_at, free_at + (int64_t)delay_ns};
            queued += size;
            data = malloc(MAX_PACKET);
        }
        t = now();
        while (head < tail && ring[head % RING].due <= t) {
            Packet *p = &ring[head++ % RING];
            if (write(d->to, p->data, p->size) < 0 && errno != EAGAIN && errno != EIO) perror("write");
            free(p->data);
            d->passed++;
            if (unsent < head) queued -= ring[unsent++ % RING].size;
        }
        struct pollfd in = {d->from, POLLIN, 0};
        if (tail - head >= RING - 1) in.events = 0;
        struct timespec wait = {1, 0};
        if (head < tail) {
            int64_t left = ring[head % RING].due - now();
            if (left < 0) left = 0;
            wait = (struct timespec){left / 1000000000, left % 1000000000};
        }
        ppoll(&in, 1, &wait, NULL);
    }
}

static void shell(const char *format, ...) {
    char command[512];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    if (system(command)) exit(1);
}

static int device(const char *name_space, int number) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK), header = sizeof(struct { char x[10]; });
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    snprintf(request.ifr_name, IFNAMSIZ, "wan%d", number);
    if (ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETVNETHDRSZ, &header)) exit((perror("tun"), 1));
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | (loss > 0 ? 0 : TUN_F_TSO4))) exit((perror("tso"), 1));
    shell("ip link set wan%d netns %s", number, name_space);
    shell("ip -n %s addr add 10.9.0.%d/24 dev wan%d", name_space, number, number);
    shell("ip -n %s link set wan%d mtu 1500 txqueuelen 10000 up", name_space, number);
    return fd;
}

int main(int argc, char **argv) {
    if (argc != 7) return fprintf(stderr, "see the head of the source\n"), 2;
    delay_ns = atof(argv[3]) * 1e6 / 2;
    ns_per_byte = 8e3 / atof(argv[4]);
    loss = atof(argv[5]) / 100;
    buffer_bytes = atol(argv[6]);
    int a = device(argv[1], 1), b = device(argv[2], 2);
    Direction there = {a, b, 1, 0, 0}, back = {b, a, 2, 0, 0};
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, carry, &there);
    pthread_create(&threads[1], NULL, carry, &back);
    puts("ready");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) { }
    printf("%ld packets passed, %ld dropped\n", there.passed + back.passed, there.dropped + back.dropped);
    return 0;
}
