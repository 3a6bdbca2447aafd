#!/usr/bin/perl
# A worker that is not written in Python: attaches to a server, squares the numbers of each batch, fails what is no number.
#
#     weir serve weir:External --name square --worker-socket unix:square.sock
#     perl worker.pl unix:square.sock                  (or tcp:127.0.0.1:9000)
#
# Needs nothing but Perl. A frame is its length (4 bytes, most significant first) and a msgpack map.
use strict;
use warnings;
use IO::Socket::INET;
use IO::Socket::UNIX;

$SIG{PIPE} = 'IGNORE';
my ($address) = @ARGV;
my $wait = 0.1;
while (1) {
    my $server = $address =~ /^unix:(.*)/
        ? IO::Socket::UNIX->new(Peer => $1)
        : IO::Socket::INET->new(PeerAddr => $address =~ s/^tcp://r);
    eval { work($server) } if $server;
    select(undef, undef, undef, $wait);    # the server is gone: try again, less and less often
    $wait = $wait < 2.5 ? 2 * $wait : 5;
}

sub work {
    my ($server) = @_;
    send_frame($server, '');               # give me work
    while (1) {
        my $batch = receive($server, unpack('N', receive($server, 4)));
        $wait = 0.1;
        my ($errors, $count, $answer) = ('', map_size(\$batch), '');
        for (1 .. $count) {
            my ($id, $body) = (text(\$batch), text(\$batch));
            my $is_number = $body =~ /^\s*-?\d+(\.\d+)?\s*$/;
            $errors .= $id unless $is_number;
            $answer .= pack('CC/a* CN/a*', 0xd9, $id, 0xc6, $is_number ? $body * $body : '"not a number"');
        }
        $answer .= pack('CC/a* CN/a*', 0xd9, 'error_ids', 0xdb, $errors) if $errors;
        send_frame($server, pack('CN', 0xdf, $count + ($errors ? 1 : 0)) . $answer);    # and give me more
    }
}

sub send_frame {
    my ($server, $body) = @_;
    my $frame = pack('N/a*', $body);
    while (length $frame) {
        my $sent = syswrite($server, $frame) or die "the server is gone\n";
        substr($frame, 0, $sent, '');
    }
}

sub receive {
    my ($server, $size) = @_;
    my $data = '';
    while (length $data < $size) {
        sysread($server, $data, $size - length $data, length $data) or die "the server is gone\n";
    }
    return $data;
}

# What msgpack needs to be read here: maps, texts and bytes, each with its length in the first byte or in 1, 2 or 4 more.
sub map_size { my ($data) = @_; return sized($data, 0x80, 0x0f, { 0xde => 'n', 0xdf => 'N' }) }

sub text {
    my ($data) = @_;
    my %lengths = (0xc4 => 'C', 0xc5 => 'n', 0xc6 => 'N', 0xd9 => 'C', 0xda => 'n', 0xdb => 'N');
    return substr($$data, 0, sized($data, 0xa0, 0x1f, \%lengths), '');
}

sub sized {
    my ($data, $short, $mask, $longer) = @_;
    my $first = ord(substr($$data, 0, 1, ''));
    return $first & $mask unless exists $longer->{$first};
    my $format = $longer->{$first};
    return unpack($format, substr($$data, 0, length(pack($format, 0)), ''));
}
