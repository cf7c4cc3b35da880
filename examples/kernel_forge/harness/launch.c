/* launch PROGRAM: runs it as one process that starts no other, opens no socket and writes no file.

   A filter of system calls that the program cannot take off again; whatever it covers ends the program with SIGSYS. It is
   set before the program's first instruction, so there is nothing in it (constructors, resolvers, its own _start) that
   runs outside of it. The sandbox around it is the wall; this makes the wall's inside a single process. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "there are no numbers of system calls for this machine in launch.c"
#endif

#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define END BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)
#define NEVER(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (number), 0, 1), END
/* flags is the low half of the argument; afterwards the number is loaded again */
#define NOT_TO_WRITE(number, argument)                                                                                 \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (number), 0, 4), LOAD(args[argument]),                                         \
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, WRITES, 0, 1), END, LOAD(nr)

static int confine(void)
{
    struct sock_filter filter[] = {
        LOAD(arch), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0), END,
        LOAD(nr),
#ifdef __x86_64__
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), END, /* the x32 ABI has numbers of its own */
        NEVER(__NR_fork), NEVER(__NR_vfork), NEVER(__NR_creat), NEVER(__NR_mkdir), NEVER(__NR_rename),
        NEVER(__NR_unlink), NEVER(__NR_link), NEVER(__NR_symlink), NEVER(__NR_mknod), NEVER(__NR_rmdir),
        NOT_TO_WRITE(__NR_open, 1),
#endif
        NOT_TO_WRITE(__NR_openat, 2),
        NEVER(__NR_clone), NEVER(435 /* clone3 */), NEVER(437 /* openat2 */), NEVER(425 /* io_uring_setup */),
        NEVER(__NR_socket), NEVER(__NR_socketpair), NEVER(__NR_ptrace), NEVER(__NR_kill), NEVER(__NR_tkill),
        NEVER(__NR_process_vm_readv), NEVER(__NR_process_vm_writev), NEVER(__NR_truncate), NEVER(__NR_mkdirat),
        NEVER(__NR_renameat2), NEVER(__NR_unlinkat), NEVER(__NR_linkat), NEVER(__NR_symlinkat), NEVER(__NR_mknodat),
        NEVER(__NR_memfd_create), NEVER(__NR_setsid), NEVER(__NR_setpriority), NEVER(__NR_sched_setaffinity),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
#else
static int confine(void) { return 0; } /* without Linux there is the sandbox alone */
#endif

int main(int count, char **words)
{
    if (count < 2) {
        fputs("launch PROGRAM\n", stderr);
        return 2;
    }
    if (confine() == 0)
        execv(words[1], words + 1);
    fprintf(stderr, "launch: %s\n", strerror(errno));
    return 126;
}
